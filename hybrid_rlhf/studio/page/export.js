// The page of exports: choose a finished run and formats, follow the export, and see the result with the commands to
// use it.

import {all, copyButton, fold, list, make, onChange, select, tell, tellFault, textBlock} from "./dom.js";
import {bytes, freeName} from "./format.js";
import {isOpen, jobText, makeJob} from "./jobs.js";
import {get, on, paced, post} from "./server.js";

const GGUF = [["", "no"], ["f16", "f16: as exact as the model"], ["q8_0", "q8_0: half the size"]];

// #/export?run=demo/ppo chooses that run.
export async function show(root, _rest, query) {
  const page = {wanted: query.get("run"), exports: [], job: null, hasName: false};
  page.form = makeForm(page);
  page.progress = make("section", {"aria-label": "The export that runs", hidden: true});
  page.list = make("section", {"aria-label": "Exports"});
  page.showRuns = onChange((runs) => showRuns(page, runs));
  page.showExports = onChange((exports) => showExports(page, exports)); // open cards and the focus stay
  root.append(make("h1", {}, "Export"),
    make("p.quiet", {},
      "A trained model as files for other programs, compared with the model in memory before it is kept."),
    page.form, page.progress, make("h2", {}, "Exports"), page.list);
  const loading = (load) => paced(() => load(page), {fail: tellFault}); // in order: an old answer is never the last
  const runs = loading(loadRuns), exports = loading(loadExports);
  page.look = loading(loadJobs);
  const ends = all(on("runs open", runs), on("jobs open", page.look), on("jobs open", exports),
    runs.end, exports.end, page.look.end, () => page.job?.end());
  for (const load of [runs, exports, page.look]) load();
  return ends;
}

function makeForm(page) {
  page.run = make("select", {id: "export-run", required: true, onchange: () => choose(page)});
  page.name = make("input", {id: "export-name", required: true, maxlength: "100", autocomplete: "off",
    spellcheck: "false", oninput: () => (page.hasName = page.name.value !== "")});
  page.gguf = select({id: "export-gguf", "aria-describedby": "export-ollama-help"}, GGUF);
  page.ollama = make("input", {id: "export-ollama", type: "checkbox", "aria-describedby": "export-ollama-help"});
  page.start = make("button", {type: "submit"}, "Export");
  page.fault = make("p.fault", {role: "alert"});
  page.card = make("details.export-card", {hidden: true}, make("summary", {}, "Model card of this run"),
    make("pre.said"));
  page.none = make("p", {hidden: true}, "No run has a finished model yet. ",
    make("a", {href: "#/new"}, "Start one"), ".");
  const field = (label, input) => make("div", {}, make("label", {for: input.id}, label), make("br"), input);
  return make("form.card.export", {onsubmit: (event) => submit(page, event)}, page.none,
    make("div.fields", {}, field("Finished run", page.run), field("Name of the export", page.name),
      field("GGUF file for llama.cpp", page.gguf),
      make("div.export-tick", {}, page.ollama, make("label", {for: "export-ollama"}, "Modelfile for Ollama"))),
    make("p.quiet", {id: "export-ollama-help"}, "Always: a folder for transformers (safetensors, tokenizer, model "
      + "card). Ollama reads a GGUF file; without one chosen, f16 is written too."),
    page.fault, make("div.buttons", {}, page.start), page.card);
}

async function loadRuns(page) {
  const runs = (await get("runs")).runs.filter((run) => run.has_model && run.status === "finished");
  await page.showRuns(runs.map(({id, stage}) => [id, `${id} (${stage})`]));
}

function showRuns(page, runs) {
  const before = page.wanted ?? page.run.value;
  page.none.hidden = runs.length > 0;
  page.start.disabled = !runs.length;
  page.run.replaceChildren(...runs.map(([id, text]) => make("option", {value: id}, text)));
  if (runs.some(([id]) => id === before)) page.run.value = before;
  else if (page.wanted) tell(`${page.wanted} has no finished model`, true);
  page.wanted = null;
  return choose(page);
}

// Propose a name for the export of the chosen run, and show the run's card.
async function choose(page) {
  const id = page.run.value;
  if (!id) return;
  if (!page.hasName) {
    const taken = page.exports.map((other) => other.name), stem = id.replaceAll("/", "-");
    page.name.value = freeName(stem.replace(/[^A-Za-z0-9._-]/g, "_"), (name) => taken.includes(name));
  }
  const {card} = await get("run", {id}).catch(() => ({card: null}));
  if (id !== page.run.value) return;
  page.card.hidden = !card;
  page.card.lastChild.textContent = card ?? "";
}

async function submit(page, event) {
  event.preventDefault();
  if (page.isSending) return; // not disabled: the button would lose the focus
  page.fault.textContent = "";
  page.name.removeAttribute("aria-invalid");
  page.isSending = true;
  try {
    const job = await post("jobs", {kind: "export", run: page.run.value, name: page.name.value.trim(),
      gguf: page.gguf.value || null, ollama: page.ollama.checked});
    tell(`${job.title} was started`);
    page.hasName = false;
    if (page.job?.id !== job.id) watch(page, job); // else the news of it came before this answer
    page.look();
  } catch (fault) {
    page.fault.textContent = fault.message;
    if (fault.option === "name") {
      page.name.setAttribute("aria-invalid", "true");
      page.name.focus();
    }
  } finally {
    page.isSending = false;
  }
}

// Show the export that waits or runs, after a reload too; it stays when it has ended.
async function loadJobs(page) {
  const jobs = (await get("jobs")).jobs.filter((job) => job.kind === "export"), open = jobs.filter(isOpen);
  const row = jobs.find((job) => job.id === page.job?.id);
  if (open.length && !open.includes(row)) watch(page, open.at(-1));
  else if (row) page.job.show(row);
}

function watch(page, first) {
  page.job?.end();
  const job = makeJob(first.id, "Its output");
  let shown = null;
  const show = (row) => {
    job.update(row);
    if (shown && shown !== row.state) tell(`${row.title}: ${jobText(row)}`, row.state === "failed");
    shown = row.state;
  };
  page.job = {id: first.id, end: job.end, show};
  page.progress.replaceChildren(make("h2", {}, `Export ${first.name}`), make("p", {}, `${first.title}: `, job.state),
    job.error, job.output, make("div.buttons", {}, job.stop));
  page.progress.hidden = false;
  job.output.open = true;
  show(first);
}

const loadExports = async (page) => page.showExports((await get("exports")).exports);

function showExports(page, exports) {
  page.exports = exports;
  page.list.replaceChildren(...(exports.length ? exports.map(article) : [make("p.quiet", {}, "Nothing yet: choose a run above.")]));
  return page.hasName ? null : choose(page);
}

function article({name, run, folder, files, checks, card, commands}) {
  const size = files.reduce((sum, file) => sum + file.bytes, 0);
  const link = (text, query) => make("a", {download: true, href: `api/export/file?${new URLSearchParams(query)}`}, text);
  const items = files.map((file) => [link(file.name, {name, file: file.name}), " ",
    make("span.quiet", {}, bytes(file.bytes))]);
  return make("article.card.export", {}, make("h3", {}, name),
    make("p.quiet", {}, `${run ? `from ${run}, ` : ""}${bytes(size)} in ${folder}`),
    ...checks.map((line) => make("p.export-check", {}, line)), make("p", {}, link(`Download ${name}.zip`, {name})),
    fold(`Or one of its ${files.length} files`, list(items)),
    card ? fold("Model card", make("pre.said", {}, card)) : null,
    ...commands.map(({title, text}) => commandNode(title, text, `${name} with ${title}`)));
}

function commandNode(title, command, label) {
  const text = textBlock(command, label);
  const copy = copyButton(text, tell, "Copy", {"aria-label": `Copy: ${label}`});
  return make("div.export-command", {}, make("h4", {}, title), copy, text);
}

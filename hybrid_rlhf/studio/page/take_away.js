// A model to take away: choose a finished run and formats, follow the export, and what came out with the commands to use it.

import {make, tell} from "./dom.js";
import {bytes} from "./format.js";
import {get, on, post} from "./server.js";

const STATES = {queued: "waits", running: "runs", done: "done", failed: "failed", stopped: "stopped", lost: "lost"};

// #/take?run=demo/ppo chooses that run.
export async function show(root, _rest, query) {
  const page = {wanted: query.get("run"), runs: [], exports: "", job: null, next: 0, hasName: false};
  page.form = makeForm(page);
  page.progress = make("section", {"aria-label": "The export that runs", hidden: true});
  page.list = make("section", {"aria-label": "Exports"});
  root.append(make("h1", {}, "Take away"),
    make("p.quiet", {}, "A trained model as files for other programs, compared with the model in memory before it is kept."),
    page.form, page.progress, make("h2", {}, "What is there"), page.list);
  const all = () => Promise.all([loadRuns(page), loadJobs(page), loadExports(page)]).catch(fail);
  const endings = [on("runs", () => loadRuns(page).catch(fail)), on("open", all),
    on("jobs", () => Promise.all([loadJobs(page), loadExports(page)]).catch(fail)),
    on("job", ({id}) => id === page.job && follow(page).catch(fail))];
  await all();
  return () => endings.forEach((end) => end());
}

const fail = (fault) => tell(fault.message, true);

function makeForm(page) {
  page.run = make("select", {id: "take-run", required: true, onchange: () => chosen(page)});
  page.name = make("input", {id: "take-name", required: true, maxlength: "100", autocomplete: "off", spellcheck: "false",
    oninput: () => (page.hasName = page.name.value !== "")});
  page.gguf = make("select", {id: "take-gguf", "aria-describedby": "take-ollama-help"}, make("option", {value: ""}, "no"),
    make("option", {value: "f16"}, "f16: as exact as the model"), make("option", {value: "q8_0"}, "q8_0: half the size"));
  page.ollama = make("input", {id: "take-ollama", type: "checkbox", "aria-describedby": "take-ollama-help"});
  page.start = make("button", {type: "submit"}, "Export");
  page.fault = make("p.fault", {role: "alert"});
  page.card = make("details.take-card", {hidden: true}, make("summary", {}, "Model card of this run"), make("pre.said", {}));
  page.none = make("p", {hidden: true}, "No run has a finished model yet. ", make("a", {href: "#/new"}, "Start one"), ".");
  const field = (label, input) => make("div", {}, make("label", {for: input.id}, label), make("br"), input);
  return make("form.card.take", {onsubmit: (event) => submit(page, event)}, page.none,
    make("div.fields", {}, field("Finished run", page.run), field("Name of the export", page.name),
      field("GGUF file for llama.cpp", page.gguf),
      make("div.take-tick", {}, page.ollama, make("label", {for: "take-ollama"}, "Modelfile for Ollama"))),
    make("p.quiet", {id: "take-ollama-help"}, "Always: a folder for transformers (safetensors, tokenizer, model card). "
      + "Ollama reads a GGUF file; without one chosen, f16 is written too."),
    page.fault, make("div.buttons", {}, page.start), page.card);
}

async function loadRuns(page) {
  const runs = (await get("runs")).runs.filter((run) => run.has_model && run.status === "finished");
  page.none.hidden = runs.length > 0;
  page.start.disabled = !runs.length;
  if (runs.map((run) => run.id).join("\n") === page.runs.join("\n")) return;
  page.runs = runs.map((run) => run.id);
  const before = page.wanted ?? page.run.value;
  page.run.replaceChildren(...runs.map((run) => make("option", {value: run.id}, `${run.id} (${run.stage})`)));
  if (page.runs.includes(before)) page.run.value = before;
  else if (page.wanted) tell(`${page.wanted} has no finished model`, true);
  page.wanted = null;
  await chosen(page);
}

// Another run: a name for its export, and its card.
async function chosen(page) {
  const id = page.run.value;
  if (!id) return;
  if (!page.hasName) page.name.value = freeName(page, id.replaceAll("/", "-").replace(/[^A-Za-z0-9._-]/g, "_"));
  const {card} = await get("run", {id}).catch(() => ({card: null}));
  if (id !== page.run.value) return;
  page.card.hidden = !card;
  page.card.lastChild.textContent = card ?? "";
}

function freeName(page, name) {
  const taken = new Set(page.exports ? JSON.parse(page.exports).map((each) => each.name) : []);
  let number = 1;
  while (taken.has(number > 1 ? `${name}-${number}` : name)) number++;
  return number > 1 ? `${name}-${number}` : name;
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
    await watch(page, job);
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

// The export that waits or runs is shown, also to who has come back to the page, and stays when it has ended.
async function loadJobs(page) {
  const {jobs} = await get("jobs");
  const open = jobs.filter((job) => job.kind === "export" && ["queued", "running"].includes(job.state)).at(-1);
  if (open && !jobs.some((job) => job.id === page.job && ["queued", "running"].includes(job.state))) await watch(page, open);
  else if (page.job) await follow(page);
}

async function watch(page, job) {
  if (page.job === job.id) return;
  Object.assign(page, {job: job.id, next: 0, told: ""});
  page.state = make("p", {});
  page.output = make("pre.said", {tabindex: "0", role: "region", "aria-label": "Its output"});
  page.stop = make("button", {type: "button", onclick: () => post("job/stop", {id: job.id}).catch(fail)}, "Stop");
  page.progress.replaceChildren(make("h2", {}, `Export ${job.name}`), page.state, page.output,
    make("div.buttons", {}, page.stop));
  page.progress.hidden = false;
  await follow(page);
}

// What its process has said since the last look. One look at a time: two would both append the same.
async function follow(page) {
  if (page.isReading) return void (page.isAgain = true);
  page.isReading = true;
  try {
    do {
      page.isAgain = false;
      const id = page.job, {job, output, next} = await get("job", {id, after: page.next});
      if (id !== page.job) continue;
      page.isAgain ||= next > page.next; // more than one answer holds
      page.next = next;
      page.output.append(output);
      page.output.hidden = !page.output.textContent;
      page.output.scrollTop = page.output.scrollHeight;
      describe(page, job);
    } while (page.isAgain);
  } finally {
    page.isReading = false;
  }
}

function describe(page, job) {
  const place = job.place ? `, place ${job.place} in the queue` : "";
  page.state.textContent = `${job.title}: ${STATES[job.state]}${place}${job.error ? `. ${job.error}` : ""}`;
  page.state.classList.toggle("fault", job.state === "failed" || job.state === "lost");
  page.stop.hidden = !["queued", "running"].includes(job.state);
  if (page.told && page.told !== job.state) tell(page.state.textContent, job.state === "failed");
  page.told = job.state;
}

async function loadExports(page) {
  const {exports} = await get("exports"), found = JSON.stringify(exports);
  if (found === page.exports) return; // who has opened a card or stands on a button keeps it
  page.exports = found;
  page.list.replaceChildren(...(exports.length ? exports.map(article) : [make("p.quiet", {}, "Nothing yet.")]));
  if (!page.hasName) await chosen(page);
}

function article(each) {
  const size = each.files.reduce((sum, file) => sum + file.bytes, 0);
  const files = each.files.map((file) => make("li", {}, `${file.name} `, make("span.quiet", {}, bytes(file.bytes))));
  return make("article.card.take", {}, make("h3", {}, each.name),
    make("p.quiet", {}, `${each.run ? `from ${each.run}, ` : ""}${bytes(size)} in ${each.folder}`),
    ...each.checks.map((line) => make("p.take-check", {}, line)),
    make("details", {}, make("summary", {}, `${each.files.length} files`), make("ul", {}, ...files)),
    each.card ? make("details", {}, make("summary", {}, "Model card"), make("pre.said", {}, each.card)) : null,
    ...each.commands.map((command) => commandOf(each, command)));
}

function commandOf(each, {title, text}) {
  const copy = make("button", {type: "button", "aria-label": `Copy: ${each.name} with ${title}`, onclick: () =>
    navigator.clipboard.writeText(text).then(() => tell(`Copied: ${title}`), () => tell("the browser does not let the page copy", true))},
  "Copy");
  return make("div.take-command", {}, make("h4", {}, title), copy,
    make("pre", {tabindex: "0", role: "region", "aria-label": `${each.name} with ${title}`}, text));
}

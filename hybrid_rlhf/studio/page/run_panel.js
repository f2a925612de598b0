// Beside the steps: what comes next, the name of the run, its start, and the same as YAML and as a command.

import {make, tell} from "./dom.js";
import {get, on, post} from "./server.js";
import {fieldOf, frame, goTo, textInput} from "./field_frame.js";
import {nextOf, nameFault, suggestedName} from "./next_thing.js";

export function runPanel(draft, leaving) {
  const next = make("p.next-line", {role: "status"});
  const yaml = make("pre.same-yaml", {tabindex: "0", role: "region", "aria-label": "Settings as YAML"});
  const command = make("pre.same-command", {tabindex: "0", role: "region", "aria-label": "The equal command"});
  const start = make("button.primary", {type: "button", id: "start", onclick: () => begin(draft, start)}, "Start training");
  const waits = make("p.help");
  const name = nameField(draft);
  const fault = make("p.fault", {id: "settings-fault", tabindex: "-1", hidden: true});
  draft.generalFault = fault;
  const body = make("div", {hidden: true}, name, fault, make("div.buttons", {}, start), waits, texts(draft, yaml, command));
  const show = () => {
    body.hidden = !draft.options.length;
    const {text, go} = nextOf(draft);
    if (next.dataset.text === text) return;
    next.dataset.text = text;
    next.replaceChildren(text, ...(go ? [" ", make("button.quiet-button", {type: "button", onclick: go}, "Go there")] : []));
  };
  for (const event of ["state", "loading", "trouble", "stage", "answer", "look"]) draft.on(event, show);
  draft.on("answer", () => {
    yaml.textContent = draft.answer.yaml || `# ${draft.answer.error?.text ?? ""}`;
    command.textContent = draft.answer.command ?? "";
    showRefusal(draft);
  });
  followJobs(draft, start, waits, leaving);
  show();
  return make("aside.run-panel", {"aria-label": "This run"}, make("h2", {}, "Your run"), next, body);
}

function nameField(draft) {
  const input = textInput({value: draft.state.run, id: "run-name", set: (run) => {
    draft.update({run, isNamed: Boolean(run.trim())});
    field.say(run.trim() ? nameFault(draft) : null);
  }});
  const field = frame(draft, "run", "Name of the run", input, {help: "Its folder below the studio's outputs."});
  const suggest = () => {
    if (draft.state.isNamed || document.activeElement === input) return;
    const run = suggestedName(draft);
    if (run === draft.state.run) return;
    input.value = run;
    draft.update({run});
  };
  for (const event of ["stage", "look", "state"]) draft.on(event, suggest);
  return field.node;
}

// What the studio has against the settings, beside the option that it is about; nothing where the form is still being filled.
function showRefusal(draft) {
  draft.refused?.say(draft.unread.get(draft.refused.option) ?? null);
  draft.refused = null;
  draft.generalFault.hidden = true;
  const {error} = draft.answer;
  if (!error || (nextOf(draft).isMissing && !draft.isOwn(error.option))) return;
  const field = fieldOf(draft, error.option, error.text);
  if (field) field.say(draft.unread.get(field.option) ?? error.text);
  else Object.assign(draft.generalFault, {hidden: false, textContent: error.text});
  draft.refused = field;
}

// Whether something stands in the way of going on; if so it is shown, and the focus goes there.
export function refuse(draft, isStart) {
  const next = nextOf(draft, isStart);
  if (!next.go) return false;
  tell(next.text, true);
  next.go();
  return true;
}

async function begin(draft, start) {
  if (start.getAttribute("aria-disabled")) return;
  start.setAttribute("aria-disabled", "true");
  tell("Looking at the settings once more …");
  try {
    await draft.settled();
    if (refuse(draft, true)) return;
    const job = await post("jobs", {kind: "train", stage: draft.state.stage, settings: draft.given(), run: draft.state.run.trim()});
    const run = job.run ?? draft.state.run.trim();
    draft.update({run: "", isNamed: false, signal: null});
    location.hash = `#/run/${run.split("/").map(encodeURIComponent).join("/")}`;
  } catch (fault) {
    tell(fault.message, true);
    const option = fault.option ?? (fault.status === 409 ? "run" : null);
    if (!goTo(draft, option, fault.message)) {
      Object.assign(draft.generalFault, {hidden: false, textContent: fault.message});
      draft.generalFault.focus();
    }
  } finally {
    start.removeAttribute("aria-disabled");
  }
}

function followJobs(draft, start, waits, leaving) {
  const look = async () => {
    const {jobs} = await get("jobs").catch(() => ({jobs: []}));
    draft.jobs = jobs;
    const busy = jobs.filter((job) => job.state === "running" || job.state === "queued");
    const running = busy.find((job) => job.state === "running");
    start.textContent = busy.length ? "Add to the queue" : "Start training";
    waits.textContent = busy.length ? `${running ? `${running.kind === "train" ? running.run : running.title} is running` : "Something waits already"}; `
      + `this run starts ${busy.length > 1 ? `after the ${busy.length} that are there` : "after it"}.` : "";
    draft.emit("jobs");
  };
  const list = async () => {
    const {folder, runs} = await get("runs").catch(() => ({folder: draft.runs.folder, runs: draft.runs.rows}));
    draft.runs = {folder, rows: runs};
  };
  leaving.push(on("jobs", look), on("open", look), on("runs", list));
  look();
}

function texts(draft, yaml, command) {
  return make("div", {}, make("h3", {}, "The same as a file"),
    make("p.help", {}, "These settings run without the studio too."), yaml,
    make("div.buttons", {}, copyButton("Copy the YAML", yaml), make("button", {type: "button", id: "download", onclick: () => download(draft, yaml)}, "Download")),
    make("h3", {}, "The same as a command"), command, make("div.buttons", {}, copyButton("Copy the command", command)));
}

function copyButton(title, node) {
  return make("button", {type: "button", onclick: async () => {
    try {
      await navigator.clipboard.writeText(node.textContent);
      tell("Copied.");
    } catch {
      getSelection().selectAllChildren(node);
      tell("The browser does not let the page copy; the text is selected: copy it by Ctrl+C.");
    }
  }}, title);
}

function download(draft, yaml) {
  const url = URL.createObjectURL(new Blob([yaml.textContent], {type: "application/yaml"}));
  const name = draft.answer.file;
  make("a", {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
  tell(`Saved as ${name}, where your browser keeps downloads.`);
}

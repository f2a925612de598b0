// The page of a new run: steps from what the model is to learn to the start, and beside them the run that they make.

import {checksStep} from "./checks_step.js";
import {button, copyButton, make, tell, tellFault, textBlock} from "./dom.js";
import {Draft, nameFault, nextOf, suggestedName} from "./draft.js";
import {fieldOf, goTo, inline, textField} from "./fields.js";
import {address} from "./format.js";
import {isOpen} from "./jobs.js";
import {optionsStep} from "./options.js";
import {rewardStep, rewardTitle} from "./reward_step.js";
import {get, on, paced, post} from "./server.js";
import {fresh} from "./settings.js";
import {dataStep, goalStep, modelStep} from "./start_steps.js";

export async function show(root, _rest, query) {
  root.append(make("p.quiet", {}, "Loading …"));
  const [goals, {folder, runs}, {files}] = await Promise.all([get("goals"), get("runs"), get("uploads")])
    .finally(() => root.replaceChildren());
  const draft = new Draft(goals, {folder, rows: runs}, files);
  prefill(draft, query);
  const leaving = [() => draft.close(), keepFilesOut()];
  root.append(make("div.new-run", {},
    make("div.new-steps", {}, ...heading(draft), step(1, "What should the model learn from?", goalStep(draft)),
      laterSteps(draft, leaving)),
    runPanel(draft, leaving)));
  if (draft.goal) {
    if (!draft.goal.stages.includes(draft.state.stage)) draft.update({stage: draft.goal.stages[0]});
    await draft.loadOptions();
  }
  return () => leaving.forEach((leave) => leave());
}

// ?goal=&stage=&model=&data=; then the address is a plain one, so that a reload keeps what was changed since.
function prefill(draft, query) {
  const [wanted, stage, model, path] = ["goal", "stage", "model", "data"].map((name) => query.get(name));
  const goal = draft.goals.goals.find(({id, stages}) => id === wanted || stages.includes(wanted));
  const chosen = [stage, wanted].find((name) => goal?.stages.includes(name));
  if (goal) draft.update({goal: goal.id, stage: chosen ?? goal.stages[0]});
  if (model) draft.update({model, isNew: false});
  if (path) draft.update({isSplit: false, data: {...draft.state.data, data: {...fresh().data.data, path}}});
  if (query.size) history.replaceState(null, "", "#/new");
}

// A file that is dropped beside its place does not replace the page.
function keepFilesOut() {
  const life = new AbortController();
  for (const name of ["dragover", "drop"]) {
    addEventListener(name, (event) => event.preventDefault(), {signal: life.signal});
  }
  return () => life.abort();
}

function heading(draft) {
  return [make("h1", {}, "New run"),
    make("p.quiet", {}, "A few questions, and a model trains on this machine. Nothing starts before you say so."),
    make("p.offers", {}, make("a", {href: "#/start"}, "Try an example"), " first, or ",
      inline("start over", () => startOver(draft), {id: "start-over"}), ".")];
}

function startOver(draft) {
  if (draft.goal && !confirm("Forget everything that was entered on this page?")) return;
  draft.forget();
  dispatchEvent(new HashChangeEvent("hashchange"));
}

// The steps that depend on the goal, made again whenever it or its method changes.
function laterSteps(draft, leaving) {
  const place = make("div");
  const trouble = () => make("p.fault", {role: "alert"}, `The options cannot be loaded: ${draft.trouble}. `,
    button("Try again", () => draft.loadOptions()));
  draft.on("loading", () => place.replaceChildren(make("p.quiet", {}, "Loading the options …")));
  draft.on("trouble", () => place.replaceChildren(trouble()));
  draft.on("stage", () => place.replaceChildren(...steps(draft, leaving)));
  return place;
}

function steps(draft, leaving) {
  const reward = rewardTitle(draft);
  const all = [
    ["Which model?", modelStep(draft)],
    ["Which data?", dataStep(draft)],
    ...(reward ? [[reward, rewardStep(draft)]] : []),
    ["How should it train?", optionsStep(draft)],
    ["Before you start", checksStep(draft, () => refuse(draft, false), leaving)]];
  return all.map(([title, inside], i) => step(i + 2, title, inside));
}

function step(number, title, inside) {
  const id = `step-${number}`;
  const name = make("h2", {id}, make("span.step-number", {}, `${number}.`), ` ${title}`);
  return make("section.new-step", {"aria-labelledby": id}, name, inside);
}

// ---- the panel: what comes next, the name of the run, its start, and the same as YAML and as a command

// leaving: functions to call when the page is left.
function runPanel(draft, leaving) {
  const start = button("Start training", () => begin(draft, start), {id: "start", class: "primary"});
  const waits = make("p.help");
  const fault = make("p.fault", {id: "settings-fault", tabindex: "-1", hidden: true});
  draft.showFault = (text) => {
    Object.assign(fault, {textContent: text, hidden: !text});
    if (text) fault.focus();
    return true;
  };
  const body = make("div", {hidden: true}, nameField(draft), fault, make("div.buttons", {}, start), waits,
    texts(draft));
  draft.on("answer", () => showRefusal(draft, fault));
  followJobs(draft, start, waits, leaving);
  return make("aside.run-panel", {"aria-label": "This run"}, make("h2", {}, "Your run"), nextLine(draft, body), body);
}

function nextLine(draft, body) {
  const line = make("p.next-line", {role: "status"});
  const show = () => {
    const {text, go} = nextOf(draft);
    body.hidden = !draft.options.length;
    if (line.dataset.text === text) return; // screen readers read it when it changes
    line.dataset.text = text;
    line.replaceChildren(text, ...(go ? [" ", inline("Go there", () => nextOf(draft).go?.())] : []));
  };
  draft.on("state loading trouble stage answer look jobs", show);
  show();
  return line;
}

function nameField(draft) {
  const take = (run) => {
    draft.update({run, isNamed: Boolean(run.trim())});
    field.say(run.trim() ? nameFault(draft) : null);
  };
  const field = textField(draft, "run", "Name of the run",
    {value: draft.state.run, id: "run-name", set: take, help: "Its folder below the studio's outputs."});
  draft.on("stage look state jobs", () => {
    if (draft.state.isNamed || document.activeElement === field.control) return;
    const run = suggestedName(draft);
    if (run === draft.state.run) return;
    field.control.value = run;
    draft.update({run});
  });
  return field.node;
}

// Show why the studio refuses the settings, beside the option; not where the form is still being filled.
function showRefusal(draft, general) {
  draft.refused?.say(draft.unread.get(draft.refused.option) ?? null);
  draft.refused = null;
  general.hidden = true;
  const {error} = draft.answer;
  if (!error || (nextOf(draft).isMissing && !draft.isOwn(error.option))) return;
  draft.refused = fieldOf(draft, error.option, error.text);
  if (draft.refused) draft.refused.say(draft.unread.get(draft.refused.option) ?? error.text);
  else Object.assign(general, {hidden: false, textContent: error.text});
}

// Whether something stands in the way of going on; if so it is shown, and the focus goes there.
function refuse(draft, isStart) {
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
    const run = draft.state.run.trim();
    await post("jobs", {kind: "train", stage: draft.state.stage, settings: draft.given(), run});
    draft.update({run: "", isNamed: false, signal: null});
    location.hash = `#/run/${address(run)}`;
  } catch (fault) {
    tellFault(fault);
    const option = fault.option ?? (fault.status === 409 ? "run" : null);
    if (!goTo(draft, option, fault.message)) draft.showFault(fault.message);
  } finally {
    start.removeAttribute("aria-disabled");
  }
}

// Follow the jobs that are open, which make it a queue, and the runs whose names are taken.
function followJobs(draft, start, waits, leaving) {
  const look = paced(async () => {
    draft.jobs = (await get("jobs").catch(() => ({jobs: []}))).jobs;
    const busy = draft.jobs.filter(isOpen);
    start.textContent = busy.length ? "Add to the queue" : "Start training";
    waits.textContent = busy.length ? waitText(busy) : "";
    draft.emit("jobs");
  });
  const list = async () => {
    const {folder, runs} = await get("runs").catch(() => ({folder: draft.runs.folder, runs: draft.runs.rows}));
    draft.runs = {folder, rows: runs};
  };
  leaving.push(on("jobs open", look), look.end, on("runs", list));
  look();
}

function waitText(busy) {
  const running = busy.find((job) => job.state === "running");
  const name = running?.kind === "train" ? running.run : running?.title;
  const when = busy.length > 1 ? `after the ${busy.length} that are there` : "after it";
  return `${running ? `${name} is running` : "Something waits already"}; this run starts ${when}.`;
}

function texts(draft) {
  const yaml = textBlock("", "Settings as YAML", "pre.same-yaml");
  const command = textBlock("", "The equal command", "pre.same-command");
  draft.on("answer", () => {
    yaml.textContent = draft.answer.yaml || `# ${draft.answer.error?.text ?? ""}`;
    command.textContent = draft.answer.command ?? "";
  });
  return make("div", {}, make("h3", {}, "The same as a file"),
    make("p.help", {}, "These settings run without the studio too."), yaml,
    make("div.buttons", {}, copyButton(yaml, tell, "Copy the YAML"),
      button("Download", () => download(draft.answer.file, yaml.textContent), {id: "download"})),
    make("h3", {}, "The same as a command"), command,
    make("div.buttons", {}, copyButton(command, tell, "Copy the command")));
}

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], {type: "application/yaml"}));
  make("a", {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
  tell(`Saved as ${name}, where your browser keeps downloads.`);
}

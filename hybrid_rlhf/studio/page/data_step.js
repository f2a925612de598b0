// The data: a file that is dropped or chosen, or a path or hub id; what was found in it, and whether it fits the goal.

import {make} from "./dom.js";
import {frame, inline, radios, suggestions, textInput} from "./field_frame.js";
import {bytes} from "./format.js";
import {columnsOf, dataKeys, sourceOf} from "./run_settings.js";
import {get, upload} from "./server.js";

// By goal, and by stage where each has a file of its own.
const DEMOS = {imitate: "demo/demonstrations", prefer: "demo/preferences", three_stages: "demo/preferences",
  sft: "demo/demonstrations", reward: "demo/preferences", ppo: "demo/prompts"};
const LABELS = {data: "File, folder or hub id", sft: "Answers to imitate", reward: "Pairs: a better and a worse answer",
  ppo: "Prompts to practise on"};
const KINDS = [
  {value: "one", title: "One file of pairs for all three stages",
    help: "Its prompts are dealt out, so that no stage sees another's."},
  {value: "three", title: "A file for each stage"}];
const ACCEPT = ".jsonl,.json,.csv,.parquet,.txt";
const WAIT = 500; // milliseconds after the last key

export function dataStep(draft) {
  const place = make("div");
  const show = () => place.replaceChildren(
    ...dataKeys(draft.state).map(([key, stage]) => dataField(draft, key, stage)));
  show();
  return make("div", {}, make("p", {}, `Needed: ${draft.goal.rows}`),
    draft.state.stage === "all" ? kindChoice(draft, show) : null, place, suggestions("data-known", known(draft)));
}

function kindChoice(draft, show) {
  const chosen = draft.state.isSplit ? "three" : "one";
  return radios("data-kind", {text: "How are the rows kept?"}, KINDS, chosen, (kind) => {
    draft.update({isSplit: kind === "three"});
    show();
    draft.emit("look");
  });
}

function known(draft) {
  const one = (file) => ({value: file.path, label: `uploaded: ${file.name}, ${bytes(file.bytes)}`});
  const demos = [...new Set(Object.values(DEMOS))];
  return [...draft.uploads.map(one), ...demos.map((value) => ({value, label: "built-in demo data"}))];
}

function dataField(draft, key, stage) {
  const source = () => draft.state.data[key];
  const found = make("div.data-found", {role: "status"});
  const looking = {timer: null, turn: 0};
  const look = (wait) => {
    clearTimeout(looking.timer);
    delete draft.looks[key];
    looking.timer = setTimeout(() => lookAt(draft, key, stage, found, looking), wait);
  };
  const set = (patch) => {
    draft.update({data: {...draft.state.data, [key]: {...source(), ...patch}}});
    look(WAIT);
  };
  const input = textInput({value: source().path, list: "data-known", placeholder: "rows.jsonl, a folder or a hub id",
    set: (path) => set({path})});
  const take = (path) => {
    input.value = path;
    set({path});
  };
  const demo = inline("Take the built-in demo data", () => takeDemo(draft, key, take, input));
  const after = [dropArea(draft, key, take), make("p.offers", {}, "Nothing at hand? ", demo, "."),
    moreFields(draft, key, source, set), found];
  const option = key === "data" ? "data.sources" : `data.sources.${key}`;
  const field = frame(draft, option, LABELS[key], input, {isWide: true, after});
  if (source().path) look(0);
  return field.node;
}

function takeDemo(draft, key, take, input) {
  take(DEMOS[key] ?? DEMOS[draft.state.goal] ?? "demo/prompts");
  if (!draft.asks.includes("reward_functions") || draft.state.functions.length) return;
  document.getElementById("reward-demo_correct")?.click(); // what can score the answers to it
  input.focus();
}

function moreFields(draft, key, source, set) {
  const one = (name, label, help, placeholder) => {
    const input = textInput({value: source()[name], set: (text) => set({[name]: text}), placeholder});
    return frame(draft, `data.sources.${key}.${name}`, label, input, {help}).node;
  };
  const fields = [
    one("name", "Subset", "Of a hub data set that has several, or a folder's subfolder.", "main"),
    one("split", "Split", "Of a hub data set; train where nothing is said.", "train"),
    one("columns", "Columns", "Our name: yours, separated by commas.", "prompt: question, completion: answer")];
  const isOpen = Boolean(source().name || source().split || source().columns);
  return make("details.more", {open: isOpen}, make("summary", {}, "Subset, split, and columns of other names"),
    make("div.fields", {}, ...fields));
}

function dropArea(draft, key, take) {
  const says = make("span.help", {role: "status"});
  const id = `file-${key}`;
  const chooser = make("input", {type: "file", id, accept: ACCEPT, class: "hidden"});
  const area = make("div.file-drop", {}, chooser, make("label.file-button", {for: id}, "Choose a file"),
    make("span.help", {}, " or drop it here: jsonl, json, csv, parquet or txt "), says);
  chooser.addEventListener("change", async () => {
    await send(draft, chooser.files[0], says, take);
    chooser.value = "";
  });
  area.addEventListener("dragover", (event) => {
    event.preventDefault();
    area.classList.add("over");
  });
  area.addEventListener("dragleave", () => area.classList.remove("over"));
  area.addEventListener("drop", (event) => {
    event.preventDefault();
    area.classList.remove("over");
    send(draft, event.dataTransfer.files[0], says, take);
  });
  return area;
}

async function send(draft, file, says, take) {
  if (!file) return;
  says.className = "help";
  says.textContent = `Sending ${file.name} (${bytes(file.size)}) …`;
  try {
    const {path, name} = await upload(file);
    says.textContent = `${name} is in the studio's folder.`;
    take(path);
    draft.uploads = (await get("uploads").catch(() => ({files: draft.uploads}))).files;
    document.getElementById("data-known")?.replaceWith(suggestions("data-known", known(draft)));
  } catch (fault) {
    says.className = "fault";
    says.textContent = `${file.name}: ${fault.message}`;
  }
}

async function lookAt(draft, key, stage, found, looking) {
  const source = sourceOf(draft.state.data[key]);
  const mine = ++looking.turn;
  if (!source) {
    found.replaceChildren();
    draft.emit("look");
    return;
  }
  found.style.setProperty("min-height", `${found.offsetHeight}px`); // what is below stays where it is meanwhile
  found.replaceChildren(make("p.help", {}, "Looking at the rows …"));
  const answer = await draft.lookAt({...source, stage}).catch((fault) => ({fits: false, why: fault.message}));
  if (mine !== looking.turn || draft.isClosed) return;
  draft.looks[key] = {...answer, isRead: answer.fits || Boolean(answer.columns?.length)};
  found.style.removeProperty("min-height");
  found.replaceChildren(...seen(draft.looks[key], draft.state.data[key]));
  draft.emit("look");
}

// What there is to see of a source that was looked at.
function seen(answer, {columns}) {
  const why = make(answer.fits ? "p.help" : "p.fault", {}, answer.why);
  if (!answer.isRead) return [make("p.verdict.fault", {}, "✗ They cannot be read."), why];
  const verdict = answer.fits ? make("p.verdict.good", {}, "✓ These rows fit.")
    : make("p.verdict.fault", {}, "✗ These rows do not fit.");
  const parts = [verdict, why, factList(answer)];
  if (Object.keys(columnsOf(columns)).length) {
    parts.push(make("p.help", {}, "Your names of the columns are taken into account."));
  }
  if (answer.first?.length) parts.push(firstRows(answer.first));
  return parts;
}

function factList({format, rows, columns}) {
  const facts = [["Format", format], ["Rows", rows?.toLocaleString("en")], ["Columns", columns.join(", ")]];
  const one = ([name, value]) => [make("dt", {}, name), make("dd", {}, value)];
  return make("dl.facts", {}, ...facts.filter(([, value]) => value).flatMap(one));
}

function firstRows(rows) {
  const one = (row, i) => make("pre.data-row", {tabindex: "0", role: "region", "aria-label": `Row ${i + 1}`}, row);
  return make("details", {}, make("summary", {}, `The first ${rows.length} rows`), ...rows.map(one));
}

// The first steps of a new run: the goal, the model, and the data.

import {fold, make, select, table, textBlock} from "./dom.js";
import {sourceOption} from "./draft.js";
import {frame, inline, radioPart, radios, selectField, suggestions, textField, textInput} from "./fields.js";
import {bytes} from "./format.js";
import {get, upload} from "./server.js";
import {dataKeys, sourceOf} from "./settings.js";

const REST = 250; // milliseconds
const TOOLS = ["calculator", "python_expression"];
const ENVIRONMENTS = ["guess_number", "guess_number_tool", "word_game", "reasoning_gym", "openenv"];

// ---- the goal: what to learn from, by which method, with or without tools

export function goalStep(draft) {
  const more = make("div.fields.goal-more");
  const choices = draft.goals.goals.map(({id, title, help}) => ({value: id, title, help}));
  const legend = {text: "What the model learns from", isHidden: true};
  draft.on("stage", () => showMore(draft, more));
  return make("div", {},
    radios("goal", legend, choices, draft.state.goal, (id) => choose(draft, id), "goal-card"), more);
}

// Arrow keys pass over other goals: the options are loaded when the choice has come to rest.
function choose(draft, id) {
  const goal = draft.goals.goals.find((known) => known.id === id);
  draft.options = [];
  const names = Object.keys(draft.state.settings);
  const carried = draft.goal && names.length ? {title: draft.goal.title, names} : null;
  draft.update({goal: id, stage: goal.stages[0], signal: null, carried});
  clearTimeout(draft.choosing);
  draft.choosing = setTimeout(() => draft.loadOptions(), REST);
}

function showMore(draft, more) {
  const {stages, asks} = draft.goal;
  const focused = more.contains(document.activeElement) ? document.activeElement.id : null;
  more.replaceChildren(...stages.length > 1 ? [methodField(draft)] : [],
    ...asks.includes("tools") ? toolFields(draft) : []);
  more.hidden = !more.childNodes.length;
  if (focused) document.getElementById(focused)?.focus();
}

function methodField(draft) {
  const choices = draft.goal.stages.map((stage, i) => [stage, i ? stage : `${stage} (the usual one)`]);
  const set = (stage) => {
    draft.update({stage});
    draft.loadOptions();
  };
  return selectField(draft, "stage", "Method",
    {id: "method", choices, value: draft.state.stage, set, help: draft.stageHelp}).node;
}

function toolFields(draft) {
  const box = make("input", {type: "checkbox", id: "has-tools", checked: draft.state.hasTools, onchange: () => {
    draft.update({hasTools: box.checked});
    show();
  }});
  const fields = [
    textField(draft, "environment.tools", "Tools it may call", {key: "tools", id: "tools", list: "tools-known",
      placeholder: "builtin:calculator",
      help: "Python functions with type hints and a docstring: builtin:NAME or FILE.py:NAME, separated by commas."}),
    textField(draft, "environment.factory", "Or an environment", {key: "environment", id: "environment",
      list: "environments-known", placeholder: "FILE.py:CLASS",
      help: "A class that plays the other side, such as a game; it may bring a reward of its own."})];
  const show = () => fields.forEach((field) => (field.node.hidden = !box.checked));
  const known = (name) => ({value: `builtin:${name}`, label: "comes with hybrid_rlhf"});
  show();
  const may = frame(draft, "environment", "The model may use tools", box,
    {help: "Its answer may then have several turns: it calls a tool, reads what that says, and goes on."});
  return [may.node, ...fields.map((field) => field.node), suggestions("tools-known", TOOLS.map(known)),
    suggestions("environments-known", ENVIRONMENTS.map(known))];
}

// ---- the model: a run of this studio, a folder or a hub id, or a tiny new one

const GOOD_FIRST = [["HuggingFaceTB/SmolLM2-135M-Instruct", "very small and quick"],
  ["Qwen/Qwen2.5-0.5B-Instruct", "small"]];
const PRESETS = ["tiny", "demo", "small"];
const MODEL_KINDS = [
  {value: "old", title: "A model that exists"},
  {value: "new", title: "A tiny new one",
    help: "Random at first, trained in minutes even without a card: for trying things out."}];

export function modelStep(draft) {
  const canBeNew = draft.options.some((option) => option.name === "model.preset");
  if (draft.state.isNew && !canBeNew) draft.update({isNew: false});
  const start = () => modelField(draft, "model.model_name_or_path", "The model to start from",
    {key: "model", fits: isPolicy, proposes: GOOD_FIRST});
  if (!canBeNew) return start();
  return radioPart("model-kind", "Start from", MODEL_KINDS, draft.state.isNew ? "new" : "old",
    (kind) => draft.update({isNew: kind === "new"}), () => [draft.state.isNew ? presetField(draft) : start()]);
}

function presetField(draft) {
  return selectField(draft, "model.preset", "Its size", {id: "preset", choices: PRESETS.map((name) => [name, name]),
    value: draft.state.preset, set: (preset) => draft.update({preset}),
    help: "A tokenizer is made from your data. Nothing is downloaded."}).node;
}

// Whether a run gives a model that answers, and not one that scores.
export const isPolicy = (row) => row.stage !== "reward";

// A text field for a model, here and in other steps. key, or value and set(text): see `textField`. fits(row): which
// runs are suggested; proposes: [[hub id, why]].
export function modelField(draft, option, label, {key, value = draft.state[key],
  set = (text) => draft.update({[key]: text}), fits, proposes = []}) {
  const rows = draft.runs.rows.filter((row) => row.has_model && fits(row));
  const what = make("p.help", {role: "status"}, whatItIs(draft, value.trim()));
  const id = `models-${option.replaceAll(".", "-")}`;
  const take = (text) => {
    set(text);
    what.textContent = whatItIs(draft, text.trim());
  };
  const input = textInput({value, list: id, placeholder: "a run, a folder or a hub id", set: take});
  const use = (text) => {
    input.value = text;
    take(text);
    input.focus();
  };
  const runs = rows.map((row) => ({value: row.id, label: `run of this studio: ${row.stage}, ${row.status}`}));
  const list = suggestions(id, [...runs, ...proposes.map(([name, why]) => ({value: name, label: why}))]);
  const offers = [...rows.slice(0, 3).map((row) => [row.id, `your run, ${row.stage}`]), ...proposes].flatMap(
    ([name, why], i) => [i ? ", " : "", inline(name, () => use(name)), ` (${why})`]);
  return frame(draft, option, label, input, {isWide: true,
    after: [what, list, offers.length ? make("p.offers", {}, "Or take ", ...offers) : null]}).node;
}

function whatItIs(draft, name) {
  if (!name) return "";
  const row = draft.runs.rows.find((run) => run.id === name);
  if (row) {
    return `A run of this studio: ${row.stage}, ${row.status}.${row.has_model ? "" : " It has left no model yet."}`;
  }
  if (/^[./~]/.test(name) || name.split("/").length > 2) return "A folder of this machine.";
  return "A hub id: it is fetched from huggingface.co where it is not here yet.";
}

// ---- the data: a file that is dropped or chosen, or a path or hub id; its rows, and whether they fit the goal

// By goal, and by stage where each has a file of its own.
const DEMOS = {imitate: "demo/demonstrations", prefer: "demo/preferences", three_stages: "demo/preferences",
  sft: "demo/demonstrations", reward: "demo/preferences", ppo: "demo/prompts"};
const LABELS = {data: "File, folder or hub id", sft: "Answers to imitate", reward: "Pairs: a better and a worse answer",
  ppo: "Prompts to practise on"};
const DATA_KINDS = [
  {value: "one", title: "One file of pairs for all three stages",
    help: "Its prompts are dealt out, so that no stage sees another's."},
  {value: "three", title: "A file for each stage"}];
const ACCEPT = ".jsonl,.json,.csv,.parquet,.txt";
const WAIT = 500; // milliseconds after the last key

export function dataStep(draft) {
  const fields = () => dataKeys(draft.state).map(([key, stage]) => dataField(draft, key, stage));
  const choose = (kind) => draft.update({isSplit: kind === "three"});
  const chosen = draft.state.isSplit ? "three" : "one";
  const place = draft.state.stage !== "all" ? make("div", {}, ...fields())
    : radioPart("data-kind", "How are the rows kept?", DATA_KINDS, chosen, choose, fields);
  return make("div", {}, make("p", {}, `Needed: ${draft.goal.rows}`), place,
    suggestions("data-known", known(draft)));
}

function known(draft) {
  const one = (file) => ({value: file.path, label: `uploaded: ${file.name}, ${bytes(file.bytes)}`});
  const demos = [...new Set(Object.values(DEMOS))];
  return [...draft.uploads.map(one), ...demos.map((value) => ({value, label: "built-in demo data"}))];
}

function dataField(draft, key, stage) {
  const source = () => draft.state.data[key];
  const result = make("div.data-found", {role: "status"});
  const looking = {timer: null, turn: 0};
  const look = (wait) => {
    clearTimeout(looking.timer);
    delete draft.looks[key];
    looking.timer = setTimeout(() => lookAt(draft, key, stage, result, looking, set), wait);
  };
  const set = (patch) => { // the columns that were chosen for a file go with it
    const {mappings, data} = draft.state, path = patch.path ?? source().path;
    const columns = patch.columns ?? mappings[path] ?? {};
    draft.update({data: {...data, [key]: {...source(), ...patch, columns}}, mappings: {...mappings, [path]: columns}});
    look(patch.columns ? 0 : WAIT);
  };
  const input = textInput({value: source().path, list: "data-known", placeholder: "rows.jsonl, a folder or a hub id",
    set: (path) => set({path})});
  const take = (path) => {
    input.value = path;
    set({path});
  };
  const demo = inline("Take the built-in demo data", () => takeDemo(draft, key, take, input));
  const after = [dropArea(draft, key, take), make("p.offers", {}, "Nothing at hand? ", demo, "."),
    moreFields(draft, key, source, set), result];
  const field = frame(draft, sourceOption(key), LABELS[key], input, {isWide: true, after});
  if (source().path) look(0);
  return field.node;
}

function takeDemo(draft, key, take, input) {
  take(DEMOS[key] ?? DEMOS[draft.state.goal] ?? "demo/prompts");
  if (!draft.asks.includes("reward_functions") || draft.state.functions.length) return;
  document.getElementById("reward-demo_correct")?.click(); // the function that scores answers to it
  input.focus();
}

function moreFields(draft, key, source, set) {
  const one = (name, label, help, placeholder) => textField(draft, `data.sources.${key}.${name}`, label,
    {value: source()[name], set: (text) => set({[name]: text}), help, placeholder}).node;
  const fields = [
    one("name", "Subset", "Of a hub data set that has several, or a folder's subfolder.", "main"),
    one("split", "Split", "Of a hub data set; train where nothing is said.", "train")];
  return make("details.more", {open: Boolean(source().name || source().split)},
    make("summary", {}, "Subset and split"), make("div.fields", {}, ...fields));
}

function dropArea(draft, key, take) {
  const message = make("span.help", {role: "status"});
  const id = `file-${key}`;
  const chooser = make("input", {type: "file", id, accept: ACCEPT, class: "hidden", onchange: async () => {
    await send(draft, chooser.files[0], message, take);
    chooser.value = "";
  }});
  const area = make("div.file-drop", {
    ondragover: (event) => {
      event.preventDefault();
      area.classList.add("over");
    },
    ondragleave: () => area.classList.remove("over"),
    ondrop: (event) => {
      event.preventDefault();
      area.classList.remove("over");
      send(draft, event.dataTransfer.files[0], message, take);
    }}, chooser, make("label.file-button", {for: id}, "Choose a file"),
  make("span.help", {}, " or drop it here: jsonl, json, csv, parquet or txt "), message);
  return area;
}

async function send(draft, file, message, take) {
  if (!file) return;
  const show = (text, kind) => Object.assign(message, {textContent: text, className: kind});
  show(`Sending ${file.name} (${bytes(file.size)}) …`, "help");
  try {
    const {path, name} = await upload(file);
    show(`${name} is in the studio's folder.`, "help");
    take(path);
    draft.uploads = (await get("uploads").catch(() => ({files: draft.uploads}))).files;
    document.getElementById("data-known")?.replaceWith(suggestions("data-known", known(draft)));
  } catch (fault) {
    show(`${file.name}: ${fault.message}`, "fault");
  }
}

async function lookAt(draft, key, stage, result, looking, set) {
  const source = sourceOf(draft.state.data[key]);
  const turn = ++looking.turn;
  if (!source) {
    result.replaceChildren();
    draft.emit("look");
    return;
  }
  result.style.setProperty("min-height", `${result.offsetHeight}px`); // what is below stays where it is meanwhile
  const focused = result.contains(document.activeElement) ? document.activeElement.id : "";
  result.replaceChildren(make("p.help", {}, "Looking at the rows …"));
  const answer = await draft.lookAt({...source, stage}).catch((fault) => ({fits: false, why: fault.message}));
  if (turn !== looking.turn || draft.isClosed) return;
  const {fits, first_row: row, columns} = answer;
  draft.looks[key] = {...answer, isRead: fits || Object.keys(row ?? columns ?? {}).length > 0};
  result.style.removeProperty("min-height");
  result.replaceChildren(...lookNodes(draft.looks[key], mapping(draft, key, stage, set)));
  if (focused) document.getElementById(focused)?.focus();
  draft.emit("look");
}

// ---- which of the data's columns is what

const PARTS = {prompt: "The question", completion: "The answer", chosen: "The better answer",
  rejected: "The worse answer", label: "Whether it is good", answer: "The right answer, to check against"};

function partsOf(draft, stage) {
  if (["sft", "conditional_sft"].includes(stage)) return ["prompt", "completion"];
  if (stage === "kto") return ["prompt", "completion", "label"];
  const isPairs = ["prefer", "reward", "three_stages"].includes(draft.state.goal) && stage !== "ppo";
  if (isPairs) return ["prompt", "chosen", "rejected"];
  return draft.asks.includes("reward_functions") ? ["prompt", "answer"] : ["prompt"];
}

// {missing: a sentence, or ""; nodes}: a dropdown for each part, beside the first row.
function mapping(draft, key, stage, set) {
  const {fits, columns = [], first_row: row = {}} = draft.looks[key], chosen = draft.state.data[key].columns;
  const parts = partsOf(draft, stage), lacks = parts.filter((part) => !columns.includes(part));
  const names = Object.keys(row).length ? Object.keys(row) : columns;
  const one = (part) => {
    const choices = [["", "choose a column"], ...names.map((name) => [name, name])];
    const node = select({id: `column-${key}-${part}`, onchange: () => set({columns: {...chosen, [part]: node.value}})},
      choices, chosen[part] ?? (names.includes(part) ? part : ""));
    return frame(draft, `${sourceOption(key)}.columns.${part}`, PARTS[part], node).node;
  };
  const said = lacks.map((part) => PARTS[part].replace("The ", "the ").replace("Whether", "whether"));
  const missing = fits || !lacks.length ? "" : `Missing: ${said.join(", ")}. Choose below which column that is.`;
  const shown = table([{title: "Column", cell: ([name]) => name, isHead: true},
    {title: "First row", cell: ([, text]) => text, kind: ".said"}], Object.entries(row), "The first row");
  const node = fold("Which column is what", make("div.mapping", {}, make("div", {}, ...parts.map(one)), shown));
  node.open = !fits || Object.values(chosen).some(Boolean);
  return {missing, nodes: names.length ? [node] : []};
}

function lookNodes({fits, isRead, why, format, rows, columns, first}, {missing, nodes}) {
  const reason = make(fits ? "p.help" : "p.fault", {}, why);
  if (!isRead) return [make("p.verdict.fault", {}, "✗ They cannot be read."), reason];
  const verdict = fits ? make("p.verdict.good", {}, "✓ These rows fit.")
    : make("p.verdict.fault", {}, "✗ These rows do not fit.");
  const facts = [["Format", format], ["Rows", rows?.toLocaleString("en")], ["Columns", columns.join(", ")]]
    .filter(([, value]) => value).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
  const parts = [verdict, missing ? make("p.fault", {}, missing) : "", reason, make("dl.facts", {}, ...facts),
    ...nodes];
  if (first?.length) {
    parts.push(fold(`The first ${first.length} rows`,
      ...first.map((row, i) => textBlock(row, `Row ${i + 1}`, "pre.data-row"))));
  }
  return parts;
}

// The settings of what was entered: dotted option -> value, as the launcher's --config has them. Pure functions.

export const YES_NO = "yes_no";
const SOURCES = ["data", "sft", "reward", "ppo"]; // keys of state.data: one for all, or one for each of three stages
// A random model is trained whole, at the rates of the embedded demo.
const FOR_NEW = {
  "model.gradient_checkpointing": false, "model.load_in_4bit": false, "model.load_in_8bit": false, "model.lora.r": 0,
  "roles.actor.learning_rate": 1e-3, "roles.critic.learning_rate": 2e-3,
  "stages.reward.learning_rate": 2e-3, "stages.sft.learning_rate": 4e-3, "train.learning_rate": 4e-3,
};

// All that can be entered; kept for the tab, so that a reload or another page loses nothing.
export const fresh = () => ({
  goal: "", stage: "", isNew: false, preset: "demo", model: "", isSplit: false,
  data: Object.fromEntries(SOURCES.map((key) => [key, {path: "", name: "", split: "", columns: {}}])),
  mappings: {},
  hasTools: false, tools: "", environment: "",
  functions: [], functionSettings: {}, ownFunctions: "", code: "", rewardModel: "", rewardKind: "ours",
  judge: {where: "model", model: "", url: "", api_model: "", api_key_env: "", rubric: "general", file: "",
    instructions: "", items: [{question: "", kind: "0-10", weight: 1}]},
  teacher: "", card: "", settings: {}, run: "", isNamed: false, signal: null,
  carried: null,
});

export const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

// "a, b" -> ["a", "b"]
export const listOf = (text) => text.split(",").map((part) => part.trim()).filter(Boolean);

// The keys of state.data that are in use, each with the stage that reads it.
export function dataKeys(state) {
  if (state.stage !== "all") return [["data", state.stage]];
  return state.isSplit ? [["sft", "sft"], ["reward", "reward"], ["ppo", "ppo"]] : [["data", "all"]];
}

// The folder of a run that is named by its id; any other text is a path or a hub id as it is.
function pathOf(text, runs) {
  const name = text.trim();
  return runs.rows.some((row) => row.id === name) ? `${runs.folder}/${name}` : name;
}

// The settings of the steps, without the options that were set by hand.
export function guided(state, asks, runs) {
  const settings = {...modelSettings(state, runs), ...dataSettings(state)};
  if (asks.includes("tools") && state.hasTools) Object.assign(settings, toolSettings(state));
  if (asks.includes("reward_functions")) Object.assign(settings, functionSettings(state));
  if (asks.includes("reward_model")) Object.assign(settings, rewardModelSettings(state, runs));
  if (asks.includes("judge")) Object.assign(settings, judgeSettings(state, runs));
  if (asks.includes("teacher") && state.teacher.trim()) {
    settings["roles.teacher.model_name_or_path"] = pathOf(state.teacher, runs);
  }
  return settings;
}

// Settings of the goal, which an option set by hand replaces: the rows of three files need no split.
export function proposed(state) {
  const split = state.stage === "all" ? {"data.split": state.isSplit ? null : [2, 4, 4]} : {};
  return state.isNew ? {...split, ...FOR_NEW} : split;
}

function modelSettings(state, runs) {
  if (state.isNew) return {"model.preset": state.preset};
  return state.model.trim() ? {"model.model_name_or_path": pathOf(state.model, runs)} : {};
}

function dataSettings(state) {
  const sources = [];
  for (const [key, stage] of dataKeys(state)) {
    const source = sourceOf(state.data[key]);
    if (!source) continue;
    if (state.stage !== "all") sources.push(same(Object.keys(source), ["path"]) ? source.path : source);
    else if (state.isSplit) sources.push({...source, stages: [stage]});
    else sources.push(...["sft", "reward", "ppo"].map((name) => ({...source, stages: [name]})));
  }
  return sources.length ? {"data.sources": sources} : {};
}

// {path, name, split, columns} as entered, without what is empty; null without a path.
export function sourceOf({path, name, split, columns}) {
  if (!path.trim()) return null;
  const pairs = Object.fromEntries(Object.entries(columns).filter(([, theirs]) => theirs));
  return {path: path.trim(), ...(name.trim() && {name: name.trim()}), ...(split.trim() && {split: split.trim()}),
    ...(Object.keys(pairs).length && {columns: pairs})};
}

function toolSettings(state) {
  const tools = listOf(state.tools), factory = state.environment.trim();
  return {...(tools.length && {"environment.tools": tools}), ...(factory && {"environment.factory": factory})};
}

function functionSettings(state) {
  const functions = [...state.functions.map((name) => `builtin:${name}`), ...listOf(state.ownFunctions)];
  const options = state.functions.map((name) => [name, state.functionSettings[name]])
    .filter(([, value]) => value && Object.keys(value).length);
  return {...(functions.length && {"reward.functions": functions}),
    ...(options.length && {"reward.options": Object.fromEntries(options)})};
}

function rewardModelSettings(state, runs) {
  if (!state.rewardModel.trim()) return {};
  const path = pathOf(state.rewardModel, runs);
  return state.rewardKind === "ours" ? {"roles.reward.model_name_or_path": path} : {"reward.models": [path]};
}

function judgeSettings({judge}, runs) {
  const settings = {};
  const put = (name, value) => value.trim() && (settings[`reward.judge.${name}`] = value.trim());
  if (judge.where === "model") put("model", pathOf(judge.model, runs));
  else for (const name of ["url", "api_model", "api_key_env"]) put(name, judge[name]);
  if (judge.rubric === "file") put("rubric", judge.file);
  else if (judge.rubric === "own" && rubricOf(judge)) settings["reward.judge.rubric"] = rubricOf(judge);
  return settings;
}

// The rubric as the judge's settings have it; each item has a name of its own, made from its question.
function rubricOf(judge) {
  const items = [];
  for (const {question, kind, weight} of judge.items.filter((item) => item.question.trim())) {
    const words = question.toLowerCase().replace(/[^a-z0-9 ]/g, "").trim().split(/ +/).slice(0, 4).join("_");
    const stem = `${/^[a-z]/.test(words) ? words : `item_${words}`}`.slice(0, 36).replace(/_+$/, "");
    let name = ["reason", "better"].includes(stem) ? `is_${stem}` : stem;
    for (let n = 2; items.some((item) => item.name === name); n++) name = `${stem}_${n}`;
    items.push({name, kind, weight: Number(weight), question: question.trim()});
  }
  if (!items.length) return null;
  return judge.instructions.trim() ? {instructions: judge.instructions.trim(), items} : {items};
}

// What was entered as settings: dotted option -> value, as the launcher's --config has them. Pure functions, no page.

export const YES_NO = "yes_no";
const SOURCES = ["data", "sft", "reward", "ppo"]; // keys of state.data: one for all, or one for each of three stages
// A random model is trained whole, at the rates of the embedded demo.
const FOR_NEW = {
  "model.gradient_checkpointing": false, "model.load_in_4bit": false, "model.load_in_8bit": false, "model.lora.r": 0,
  "roles.actor.learning_rate": 1e-3, "roles.critic.learning_rate": 2e-3,
  "stages.reward.learning_rate": 2e-3, "stages.sft.learning_rate": 4e-3, "train.learning_rate": 4e-3,
};

// All that a visitor may enter; kept for the tab, so that a reload or another page loses nothing.
export const fresh = () => ({
  goal: "", stage: "", isNew: false, preset: "demo", model: "", isSplit: false,
  data: Object.fromEntries(SOURCES.map((key) => [key, {path: "", name: "", split: "", columns: ""}])),
  hasTools: false, tools: "", environment: "",
  functions: [], functionSettings: {}, ownFunctions: "", rewardModel: "", rewardKind: "ours",
  judge: {where: "model", model: "", url: "", api_model: "", api_key_env: "", rubric: "general", file: "",
    instructions: "", items: [{question: "", kind: "0-10", weight: 1}]},
  teacher: "", card: "", settings: {}, run: "", isNamed: false, signal: null,
});

export const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

// "a, b" -> ["a", "b"]
export const listOf = (text) => text.split(",").map((each) => each.trim()).filter(Boolean);

// The keys of state.data that a goal asks for, each with the stage that reads it.
export function dataKeys(state) {
  if (state.stage !== "all") return [["data", state.stage]];
  return state.isSplit ? [["sft", "sft"], ["reward", "reward"], ["ppo", "ppo"]] : [["data", "all"]];
}

// The folder of a run that is named by its id; any other text is a path or a hub id as it is.
export function pathOf(text, runs) {
  const named = text.trim();
  return runs.rows.some((row) => row.id === named) ? `${runs.folder}/${named}` : named;
}

// What the steps say, without the options that were set by hand.
export function guided(state, asks, runs) {
  const found = {...modelSettings(state, runs), ...dataSettings(state)};
  if (asks.includes("tools") && state.hasTools) Object.assign(found, toolSettings(state));
  if (asks.includes("reward_functions")) Object.assign(found, functionSettings(state));
  if (asks.includes("reward_model")) Object.assign(found, rewardModelSettings(state, runs));
  if (asks.includes("judge")) Object.assign(found, judgeSettings(state, runs));
  if (asks.includes("teacher") && state.teacher.trim()) {
    found["roles.teacher.model_name_or_path"] = pathOf(state.teacher, runs);
  }
  return found;
}

// What the goal chooses and an option set by hand replaces: three files are three stages' own rows, none is dealt out.
export function proposed(state) {
  const found = state.stage === "all" ? {"data.split": state.isSplit ? null : [2, 4, 4]} : {};
  return state.isNew ? {...found, ...FOR_NEW} : found;
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
    else sources.push(...["sft", "reward", "ppo"].map((each) => ({...source, stages: [each]})));
  }
  return sources.length ? {"data.sources": sources} : {};
}

// {path, name, split, columns} of what was entered, without what is empty; null without a path.
export function sourceOf({path, name, split, columns}) {
  if (!path.trim()) return null;
  const source = {path: path.trim()};
  if (name.trim()) source.name = name.trim();
  if (split.trim()) source.split = split.trim();
  const pairs = columnsOf(columns);
  if (Object.keys(pairs).length) source.columns = pairs;
  return source;
}

// "prompt: question, completion: answer" -> {prompt: "question", completion: "answer"}
export function columnsOf(text) {
  const pairs = listOf(text).map((each) => each.split(/[:=]/).map((part) => part.trim()));
  return Object.fromEntries(pairs.filter(([ours, theirs]) => ours && theirs));
}

function toolSettings(state) {
  const found = {};
  if (listOf(state.tools).length) found["environment.tools"] = listOf(state.tools);
  if (state.environment.trim()) found["environment.factory"] = state.environment.trim();
  return found;
}

function functionSettings(state) {
  const found = {};
  const named = [...state.functions.map((name) => `builtin:${name}`), ...listOf(state.ownFunctions)];
  if (named.length) found["reward.functions"] = named;
  const given = state.functions.map((name) => [name, settingsOf(state.functionSettings[name])]);
  const filled = given.filter(([, value]) => value && Object.keys(value).length);
  if (filled.length) found["reward.options"] = Object.fromEntries(filled);
  return found;
}

// A function's own settings as an object; null where the text is none.
export function settingsOf(text) {
  if (!text?.trim()) return {};
  try {
    const value = JSON.parse(text);
    return value && typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}

function rewardModelSettings(state, runs) {
  if (!state.rewardModel.trim()) return {};
  const path = pathOf(state.rewardModel, runs);
  return state.rewardKind === "ours" ? {"roles.reward.model_name_or_path": path} : {"reward.models": [path]};
}

function judgeSettings({judge}, runs) {
  const found = {};
  const put = (name, value) => value.trim() && (found[`reward.judge.${name}`] = value.trim());
  if (judge.where === "model") put("model", pathOf(judge.model, runs));
  else for (const name of ["url", "api_model", "api_key_env"]) put(name, judge[name]);
  if (judge.rubric === "file") put("rubric", judge.file);
  else if (judge.rubric === "own" && rubricOf(judge)) found["reward.judge.rubric"] = rubricOf(judge);
  return found;
}

// The rubric as the judge's settings have it; each item has a name of its own, made from its question.
export function rubricOf(judge) {
  const items = [];
  for (const {question, kind, weight} of judge.items.filter((each) => each.question.trim())) {
    const words = question.toLowerCase().replace(/[^a-z0-9 ]/g, "").trim().split(/ +/).slice(0, 4).join("_");
    const stem = `${/^[a-z]/.test(words) ? words : `item_${words}`}`.slice(0, 36).replace(/_+$/, "");
    let name = ["reason", "better"].includes(stem) ? `is_${stem}` : stem;
    for (let n = 2; items.some((each) => each.name === name); n++) name = `${stem}_${n}`;
    items.push({name, kind, weight: Number(weight), question: question.trim()});
  }
  if (!items.length) return null;
  return judge.instructions.trim() ? {instructions: judge.instructions.trim(), items} : {items};
}

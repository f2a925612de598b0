// Talk to the models of runs, up to three side by side, and judge their answers, which makes data to train on.
// The conversation stays while the studio's page is open, whatever other page is looked at between.

import {converse} from "./chat_stream.js";
import {all, button, make, onChange} from "./dom.js";
import {lessons} from "./lessons.js";
import {judge, tally} from "./marks.js";
import {get, on, post} from "./server.js";

const FIELDS = [ // id, label, value, properties
  ["temperature", "Temperature", "0.7", {min: "0", max: "5", step: "0.1"}],
  ["top_p", "Top p", "1", {min: "0.01", max: "1", step: "0.01"}],
  ["max_tokens", "Longest answer, tokens", "256", {min: "1", step: "1"}],
  ["seed", "Seed", "0", {step: "1"}],
];
const turns = [], pictures = []; // pictures: of the next question
const settings = Object.fromEntries(FIELDS.map(([id, , value]) => [id, value]));
let system = "", unsent = "";

export async function show(root, rest, query) {
  let state = {state: "closed", models: [], reward: false};
  let readers = []; // names of models that read images
  const view = build();
  const showHints = onChange((hints) => view.hints.replaceChildren(...(hints ? [make("p.quiet", {}, hints.knows),
    make("div.buttons", {}, ...hints.questions.map((text) => button(text, () => {
      view.message.value = text;
      view.form.requestSubmit();
    })))] : [])));
  const models = chooser(take, rest ? [rest] : query.getAll("model"));
  const findReaders = onChange(async (models) => {
    const {data} = models.length ? await get("talk/v1/models").catch(() => ({data: []})) : {data: []};
    readers = data.filter((model) => model.reads_images).map((model) => model.id);
    talk.update();
  });
  const learns = lessons({turns, tell: message, changed: () => talk.update(), placed: (turn) => {
    talk.place(turn);
    judge(turn, marks);
  }});
  const marks = tally(() => state.models[0]?.id ?? null, message, learns);
  const talk = converse(view, {
    turns, pictures, tell: message, reads: (model) => readers.includes(model), chat: "api/talk/v1/chat/completions",
    isOpen: () => state.state === "ready" && !learns.isBusy(),
    models: () => state.models.map((model) => model.name),
    settings: () => ({...Object.fromEntries(FIELDS.map(([id]) => [id, Number(settings[id])])), system}),
    score: () => state.reward && view.scores.checked ? "api/talk/score" : null,
    answered: (turn) => judge(turn, marks),
  });
  root.append(make("h1", {}, "Talk"), models.node, view.chat);
  view.chat.append(marks.node, learns.node);
  take(state);
  for (const turn of turns) {
    talk.place(turn);
    judge(turn, marks);
  }

  function message(text, isFault = false) {
    view.told.textContent = text;
    view.told.classList.toggle("fault", isFault);
  }

  function take(status) {
    state = status;
    view.chat.hidden = state.state !== "ready" && !turns.length;
    view.form.classList.toggle("shut", ["failed", "closed"].includes(state.state)); // then nobody answers
    view.scores.parentNode.hidden = !state.reward;
    marks.node.hidden = Boolean(state.learn);
    view.second.hidden = !state.learn;
    learns.take(state.state === "ready" ? state.learn : null);
    showHints(state.hints);
    talk.update();
    findReaders(state.state === "ready" ? state.models : []);
  }

  view.fresh.addEventListener("click", () => take(state)); // without turns the chat of closed models is hidden
  const leave = all(on("talk", models.update), on("open", models.load), models.leave, talk.leave,
    () => (unsent = view.message.value));
  await Promise.all([models.load(), marks.load()]).catch((fault) => message(fault.message, true));
  return leave;
}

function build() {
  const fields = FIELDS.map(([id, text, , more]) => {
    const input = make("input", {id, type: "number", value: settings[id], ...more,
      onchange: () => (settings[id] = input.value)});
    return make("label", {}, `${text} `, input);
  });
  const instructions = make("textarea",
    {id: "system", rows: "2", onchange: () => (system = instructions.value)}, system);
  const scores = make("input", {id: "score", type: "checkbox", checked: true});
  const empty = make("p.quiet", {}, "Say something below. All of it stays on this machine.");
  const log = make("div.log", {tabindex: "0", role: "region", "aria-label": "Conversation"}, empty);
  const message = make("textarea", {
    id: "message", rows: "2", required: true, placeholder: "Enter sends, Shift+Enter starts a line"}, unsent);
  const send = make("button", {type: "submit", id: "send"}, "Send");
  const files = make("input", {type: "file", id: "files", accept: "image/*", multiple: true, hidden: true});
  const attached = make("div.pictures",
    {id: "attached", role: "group", "aria-label": "Pictures of the next question", hidden: true});
  const words = [["attach", "Add pictures"], ["stop", "Stop"], ["again", "Answer again"], ["second", "Second answer"],
    ["fresh", "New chat"]];
  const [attach, stop, again, second, fresh] = words.map(([id, text]) => make("button", {type: "button", id}, text));
  const told = make("p.told", {id: "talk-told", role: "status"});
  const hints = make("div.hints");
  const form = make("form.composer", {}, hints, told, make("label", {for: "message"}, "Message"), message, attached, files,
    make("div.buttons", {}, send, attach, stop, again, second, fresh));
  const chat = make("div.chat", {hidden: true}, make("details", {id: "settings"}, make("summary", {}, "Settings"),
    make("div.fields", {}, ...fields, make("label.wide", {}, "System message ", instructions),
      make("label.check.wide", {hidden: true}, scores, " Show the reward model's score of each answer"))), log, form);
  return {chat, hints, told, scores, empty, log, form, message, attach, files, attached, send, stop, again,
    second, fresh};
}

// ---- which models are talked to: choose and open them, and the state of that

const MODELS = ["Model", "Compare with", "And with"];

// take(state): called with each new state of the server's; wanted: ids to choose at first.
// -> {node, load, update, leave}.
function chooser(take, wanted) {
  const view = buildChooser();
  let state = null, turn = 0, isFilled = false;
  let since = 0; // when the present opening began, as this page saw it
  let runs = [], suggested = "", wished = "", refused = ""; // the last three: names of the run that learns

  // Asked again when the page is shown again: then what a person has chosen or closed meanwhile stays so.
  async function load() {
    const asked = ++turn, [{models}, status] = await Promise.all([get("talk/models"), get("talk")]);
    const isFirst = !isFilled;
    isFilled = true;
    const policies = models.filter((model) => model.kind === "policy");
    const chosen = wanted.length ? wanted : status.models.map((model) => model.id);
    const others = chosen.filter((id) => !policies.some((model) => model.id === id)); // folders and hub ids
    if (isFirst) view.other.value ||= others[0] ?? "";
    const ours = isFirst ? chosen.filter((id) => !others.includes(id)) : [];
    view.selects.forEach((select, i) => fillSelect(select, "nothing", policies, ours[i],
      isFirst && !i && !others.length));
    fillSelect(view.reward, "no scores", models.filter((model) => model.kind !== "policy"));
    const isThere = status.state !== "closed" && wanted.every((id) => status.models.some((model) => model.id === id));
    if (isFirst && status.learn && isThere) [view.learn.checked, view.taught.value] = [true, status.learn];
    view.empty.hidden = policies.length > 0 || view.other.value !== "";
    if (isFirst) view.onCpu.checked = status.models.length ? status.is_on_cpu
      : models.some((model) => model.status === "running");
    runs = policies;
    adapt();
    if (asked === turn) showState(status);
    if (isFirst && wanted.length && !isThere) await open(); // a link from a run's page opens that run
  }

  // The answer to the newest request counts: an older one may come later, with a state that has passed.
  async function update() {
    const asked = ++turn, status = await get("talk");
    if (asked === turn) showState(status);
  }

  function showState(status) {
    const before = state?.state;
    if (status.state === "starting" && before !== "starting") since = Date.now();
    state = status;
    if (status.state === "failed") refused = wished; // also where this page has not seen it start
    if (status.state !== before && status.state !== "starting") foldAway(status.state === "ready");
    view.onCpu.parentNode.hidden = !status.has_card;
    view.close.disabled = !["starting", "ready"].includes(status.state);
    view.state.textContent = stateText(status);
    view.state.classList.toggle("fault", status.state === "failed");
    view.notes.replaceChildren(...status.notes.map((line) => make("li", {}, line)));
    count();
    take(status);
  }

  // What the choice so far offers: another model to compare with, or a name for the run that learns.
  function adapt() {
    const {selects: [first, second, third], learn, taught} = view;
    second.parentNode.hidden = learn.checked;
    if (learn.checked) second.value = "";
    third.parentNode.hidden = !second.value;
    if (!second.value) third.value = "";
    taught.parentNode.hidden = !learn.checked;
    const typed = view.other.value.split("/").filter(Boolean).at(-1)?.trim();
    const name = first.value.replaceAll("/", "-") || typed || "model";
    const fresh = runs.some(({id, stage}) => id === first.value && stage === "chat") ? first.value
      : `taught-${name.replace(/[^A-Za-z0-9._-]/g, "-")}`;
    if (["", suggested, refused].includes(taught.value.trim())) taught.value = fresh;
    suggested = fresh;
  }

  // The choice makes room for the conversation; the focus stays at it.
  function foldAway(isReady) {
    const hadFocus = view.details.contains(document.activeElement);
    view.details.open = !isReady;
    if (isReady && hadFocus) view.details.querySelector("summary").focus();
  }

  function count() {
    const seconds = Math.round((Date.now() - since) / 1000);
    view.seconds.textContent = state?.state === "starting" && seconds > 0 ? `${seconds} s` : "";
  }

  async function open() {
    const models = [...new Set(view.selects.map((select) => select.value).filter(Boolean))];
    const paths = [view.other.value.trim()].filter(Boolean);
    wished = view.taught.value.trim();
    await act("talk/open", {models, paths, reward: view.reward.value || null,
      is_on_cpu: view.onCpu.checked && !view.onCpu.parentNode.hidden,
      learn: view.learn.checked ? view.taught.value.trim() : null});
  }

  async function act(path, body) {
    try {
      await post(path, body);
      await update();
    } catch (fault) {
      refused = wished;
      view.state.textContent = state?.state === "ready" ? `${fault.message}. ${stateText(state)}` : fault.message;
      view.state.classList.add("fault");
    }
  }

  view.form.addEventListener("submit", (event) => {
    event.preventDefault();
    open();
  });
  view.close.addEventListener("click", () => act("talk/close"));
  view.taught.addEventListener("change", () => (wished = refused = "")); // typed again it is meant
  for (const each of [...view.selects, view.other, view.learn, view.taught]) each.addEventListener("change", adapt);
  const clock = setInterval(count, 1000);
  return {node: view.node, load, update, leave: () => clearInterval(clock)};
}

function stateText({state, models, learn, doing, error}) {
  const names = models.map(({id, step}) => (step === null ? id : `${id} at step ${step}`)).join(", ");
  const texts = {ready: `Open: ${names}.${learn ? ` Your marks train ${learn}.` : ""}`, starting: `Opening: ${doing} ...`, failed: `It cannot be opened: ${error}`};
  return texts[state] ?? "No model is open.";
}

function buildChooser() {
  const selects = MODELS.map((_, i) => make("select", {id: `talk-model-${i + 1}`}));
  const labels = selects.map((select, i) => make("label", {hidden: i > 1}, `${MODELS[i]} `, select));
  const reward = make("select", {id: "talk-reward"});
  const onCpu = make("input", {id: "talk-cpu", type: "checkbox"});
  const close = make("button", {type: "button", id: "talk-close", disabled: true}, "Close");
  const state = make("p", {id: "talk-state", role: "status"});
  const seconds = make("span.quiet", {"aria-hidden": "true"});
  const notes = make("ul.quiet", {id: "talk-notes"});
  const learn = make("input", {id: "talk-learn", type: "checkbox"});
  const taught = make("input", {id: "talk-taught", autocomplete: "off", spellcheck: "false", maxlength: "80"});
  const other = make("input", {id: "talk-other", autocomplete: "off", spellcheck: "false",
    placeholder: "HuggingFaceTB/SmolLM2-135M-Instruct"});
  const empty = make("p", {id: "talk-empty", hidden: true}, "There is no run with a model yet: ",
    make("a", {href: "#/start"}, "begin one"), ", or name any model.");
  const form = make("form", {"aria-label": "Models"}, empty,
    make("div.fields", {}, ...labels, 
      make("label", {}, "Any folder or hub id ", other), make("label", {}, "Reward model ", reward)),
    make("label.check", {}, learn, " Learn from my marks: each trains it at once, on an adapter"),
    make("label", {hidden: true}, "In the run ", taught),
    make("label.check", {hidden: true}, onCpu,
      " Answer on the processor: slower, and it leaves the card to the training"),
    make("div.buttons", {}, make("button", {type: "submit", id: "talk-open"}, "Open"), close));
  const details = make("details", {id: "talk-choice", open: true}, make("summary", {}, "Models"), form);
  const node = make("section.card.chooser", {"aria-label": "Models"}, details,
    make("div.opening", {}, state, seconds), notes);
  return {node, details, form, selects, other, learn, taught, reward, onCpu, close, state, seconds, notes, empty};
}

// hasFirst: where nothing is chosen, the first model is. A list that is open stays open where its options are the same.
function fillSelect(select, none, models, chosen = select.value, hasFirst = false) {
  const options = models.map(({id, status, step, why}) => {
    const about = why !== null ? ` (${status}: ${why})` : step === null ? "" : ` (${status}, step ${step})`;
    return make("option", {value: id, disabled: why !== null}, id + about);
  });
  const list = [new Option(none, ""), ...options];
  const isSame = list.length === select.length && list.every((option, i) => option.isEqualNode(select[i]));
  if (!isSame) select.replaceChildren(...list);
  const usable = options.filter((option) => !option.disabled).map((option) => option.value);
  if (usable.includes(chosen)) select.value = chosen;
  else select.value = hasFirst ? usable[0] ?? "" : "";
}

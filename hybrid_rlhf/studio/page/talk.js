// Talk to the models of runs, up to three side by side; judge what they say, which makes data to train on.
// The conversation stays while the studio's page is open, whatever other page is looked at between.

import {fill, follow, layOut, messagesFor} from "./chat_stream.js";
import {make} from "./dom.js";
import {on} from "./server.js";
import {judge, tally} from "./talk_marks.js";
import {chooser} from "./talk_models.js";

const FIELDS = [ // id, label, value, properties
  ["temperature", "Temperature", "0.7", {min: "0", max: "5", step: "0.1"}],
  ["top_p", "Top p", "1", {min: "0.01", max: "1", step: "0.01"}],
  ["max_tokens", "Longest answer, tokens", "256", {min: "1", step: "1"}],
  ["seed", "Seed", "0", {step: "1"}],
];
const turns = [];
const settings = Object.fromEntries(FIELDS.map(([id, , value]) => [id, value]));
let system = "";
let asking = null; // the AbortController of the answers being written

export async function show(root, rest, query) {
  let isHere = true;
  let state = {state: "closed", models: [], reward: false};
  const view = build();
  const models = chooser(take, rest ? [rest] : query.getAll("model"));
  const marks = tally(() => state.models[0]?.id ?? null, tell);
  root.append(make("h1", {}, "Talk"), models.node, view.chat);
  view.chat.append(marks.node);
  take(state);
  for (const turn of turns) place(turn);

  function tell(text, isFault = false) {
    view.told.textContent = text;
    view.told.classList.toggle("fault", isFault);
  }

  function take(found) {
    state = found;
    view.chat.hidden = state.state !== "ready" && !turns.length;
    view.scores.parentNode.hidden = !state.reward;
    setBusy();
  }

  function setBusy(text = null) {
    const isOpen = state.state === "ready";
    view.send.disabled = !isOpen || asking !== null;
    view.again.disabled = !isOpen || asking !== null || !turns.length;
    view.stop.disabled = asking === null;
    view.log.setAttribute("aria-busy", String(asking !== null));
    view.empty.hidden = turns.length > 0;
    if (text !== null) tell(text);
  }

  function place(turn) {
    const section = layOut(turn);
    if (turn.node?.parentNode === view.log) turn.node.replaceWith(section);
    else view.log.append(section);
    turn.node = section;
    if (!asking) judge(turn, marks);
    view.log.scrollTop = view.log.scrollHeight;
  }

  function requestFor(name, index) {
    const numbers = Object.fromEntries(FIELDS.map(([id]) => [id, Number(settings[id])]));
    return {...numbers, model: name, seed: numbers.seed + index + (turns[index].tries ?? 0) * 1000,
      messages: messagesFor(turns, index, name, system.trim())};
  }

  async function answerLast() {
    const index = turns.length - 1;
    const turn = turns[index];
    turn.kept = undefined;
    turn.answers = state.models.map((each) => ({model: each.name, text: ""}));
    asking = new AbortController();
    place(turn);
    setBusy("Answering. Escape stops.");
    const score = state.reward && view.scores.checked ? "api/talk/score" : null;
    await Promise.all(turn.answers.map((answer) => {
      const request = requestFor(answer.model, index);
      answer.asked = request.messages;
      return fill(answer, {request, chat: "api/talk/v1/chat/completions", score, signal: asking.signal,
        headers: {"Content-Type": "application/json"}, grew: () => follow(view.log)});
    }));
    if (!isHere) return;
    asking = null;
    judge(turn, marks);
    follow(view.log);
    setBusy("Answered.");
  }

  view.form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = view.message.value.trim();
    if (!text || asking || state.state !== "ready") return;
    view.message.value = "";
    turns.push({text, answers: []});
    answerLast();
  });
  view.message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      view.form.requestSubmit();
    }
  });
  const escape = (event) => event.key === "Escape" && asking?.abort();
  document.addEventListener("keydown", escape);
  view.stop.addEventListener("click", () => asking?.abort());
  view.again.addEventListener("click", () => {
    turns.at(-1).tries = (turns.at(-1).tries ?? 0) + 1;
    answerLast();
  });
  view.fresh.addEventListener("click", () => {
    asking?.abort();
    for (const turn of turns.splice(0)) turn.node.remove();
    take(state);
    view.message.focus();
  });

  const ends = [on("talk", () => models.update()), on("open", () => models.load())];
  const leave = () => {
    ends.forEach((end) => end());
    models.leave();
    document.removeEventListener("keydown", escape);
    isHere = false;
    asking?.abort();
    asking = null;
  };
  try {
    await Promise.all([models.load(), marks.load()]);
  } catch (fault) {
    tell(fault.message, true);
  }
  return leave;
}

function build() {
  const fields = FIELDS.map(([id, text, , more]) => {
    const input = make("input", {id, type: "number", value: settings[id], ...more});
    input.addEventListener("change", () => (settings[id] = input.value));
    return make("label", {}, `${text} `, input);
  });
  const said = make("textarea", {id: "system", rows: "2"});
  said.value = system;
  said.addEventListener("change", () => (system = said.value));
  const scores = make("input", {id: "score", type: "checkbox", checked: true});
  const empty = make("p.quiet", {}, "Say something below. All of it stays on this machine.");
  const log = make("div.log", {tabindex: "0", role: "region", "aria-label": "Conversation"}, empty);
  const message = make("textarea", {
    id: "message", rows: "2", required: true, placeholder: "Enter sends, Shift+Enter starts a line"});
  const send = make("button", {type: "submit", id: "send"}, "Send");
  const [stop, again, fresh] = [["stop", "Stop"], ["again", "Answer again"], ["fresh", "New chat"]].map(
    ([id, text]) => make("button", {type: "button", id}, text));
  const told = make("p.told", {id: "talk-told", role: "status"});
  const form = make("form.composer", {}, told, make("label", {for: "message"}, "Message"), message,
    make("div.buttons", {}, send, stop, again, fresh));
  const chat = make("div.chat", {hidden: true}, make("details", {id: "settings"}, make("summary", {}, "Settings"),
    make("div.fields", {}, ...fields, make("label.wide", {}, "System message ", said),
      make("label.check.wide", {hidden: true}, scores, " Show the reward model's score of each answer"))), log, form);
  return {chat, told, scores, empty, log, form, message, send, stop, again, fresh};
}

// The chat page: talks to /v1/models, /v1/chat/completions and /score of the server that it came from, and to nothing else.

import {fill, follow, layOut, messagesFor, refusal} from "./chat_stream.js";

const at = (id) => document.getElementById(id);

const turns = [];
let asking = null; // the AbortController of the answers being written

function headers() {
  const key = at("key").value;
  return {"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})};
}

async function loadModels() {
  const answer = await fetch("v1/models", {headers: headers()});
  if (answer.status === 401) {
    at("key-field").hidden = false;
    at("settings").open = true;
    at("key").focus();
    return tell("This server asks for its API key: give it under Settings.");
  }
  if (!answer.ok) return tell(await refusal(answer));
  const names = (await answer.json()).data.map((model) => model.id);
  at("model").replaceChildren(...names.map((name) => new Option(name, name)));
  at("other").replaceChildren(new Option("nothing", ""), ...names.map((name) => new Option(name, name)));
  at("model").value = names.at(-1);
  const health = await fetch("health").then((reply) => reply.json()).catch(() => ({}));
  at("score-field").hidden = !health.reward_model;
  tell("");
}

function tell(text) {
  at("status").textContent = text;
}

function requestFor(model, index) {
  return {
    model, messages: messagesFor(turns, index, model, at("system").value.trim()),
    temperature: Number(at("temperature").value), top_p: Number(at("top_p").value),
    max_tokens: Number(at("max_tokens").value), seed: Number(at("seed").value) + index + (turns[index].tries ?? 0) * 1000,
  };
}

function show(turn) {
  const section = layOut(turn);
  if (turn.node) turn.node.replaceWith(section);
  else at("log").append(section);
  turn.node = section;
  at("log").scrollTop = at("log").scrollHeight;
}

async function answerLast() {
  const index = turns.length - 1;
  const names = [...new Set([at("model").value, at("other").value].filter(Boolean))];
  turns[index].answers = names.map((model) => ({model, text: ""}));
  show(turns[index]);
  asking = new AbortController();
  setBusy(true);
  const score = !at("score-field").hidden && at("score").checked ? "score" : null;
  await Promise.all(turns[index].answers.map((answer) => fill(answer, {
    request: requestFor(answer.model, index), chat: "v1/chat/completions", score, headers: headers(),
    signal: asking.signal, grew: () => follow(at("log"))})));
  asking = null;
  setBusy(false);
}

function setBusy(isBusy) {
  at("send").disabled = isBusy;
  at("stop").disabled = !isBusy;
  at("again").disabled = isBusy || turns.length === 0;
  at("log").setAttribute("aria-busy", String(isBusy));
  tell(isBusy ? "Answering. Escape stops." : turns.length ? "Answered." : "");
}

function stop() {
  asking?.abort();
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("message").value.trim();
  if (!text || asking) return;
  if (!at("model").value) return loadModels();
  at("message").value = "";
  at("empty").hidden = true;
  turns.push({text, answers: []});
  answerLast();
});
at("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
at("stop").addEventListener("click", stop);
at("again").addEventListener("click", () => {
  turns.at(-1).tries = (turns.at(-1).tries ?? 0) + 1;
  answerLast();
});
at("fresh").addEventListener("click", () => {
  stop();
  turns.length = 0;
  for (const section of document.querySelectorAll(".turn")) section.remove();
  at("empty").hidden = false;
  setBusy(false);
  at("message").focus();
});
at("key").addEventListener("change", loadModels);
loadModels().catch((fault) => tell(`No answer from the server: ${fault.message}`));

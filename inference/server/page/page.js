// The chat page: talks to /v1/models, /v1/chat/completions and /score of the server that it came from, to nothing else.

import {converse, refusal} from "./chat_stream.js";

let readers = []; // models that read images

const at = (id) => document.getElementById(id);

function headers() {
  const key = at("key").value;
  return key ? {Authorization: `Bearer ${key}`} : {};
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
  const models = (await answer.json()).data, names = models.map((model) => model.id);
  readers = models.filter((model) => model.reads_images).map((model) => model.id);
  at("model").replaceChildren(...names.map((name) => new Option(name, name)));
  at("other").replaceChildren(new Option("nothing", ""), ...names.map((name) => new Option(name, name)));
  at("model").value = names.at(-1);
  const health = await fetch("health").then((reply) => reply.json()).catch(() => ({}));
  at("score-field").hidden = !health.reward_model;
  tell("");
  talk.update();
}

function tell(text) {
  at("status").textContent = text;
}

const nodes = ["log", "empty", "message", "attach", "files", "attached", "send", "stop", "again", "fresh"].map(
  (id) => [id, at(id)]);
const talk = converse({...Object.fromEntries(nodes), form: at("composer")}, {
  turns: [],
  pictures: [],
  isOpen: () => true,
  models: () => [...new Set([at("model").value, at("other").value].filter(Boolean))],
  reads: (model) => readers.includes(model),
  load: loadModels,
  settings: () => ({system: at("system").value, ...Object.fromEntries(
    ["temperature", "top_p", "max_tokens", "seed"].map((id) => [id, Number(at(id).value)]))}),
  chat: "v1/chat/completions",
  score: () => !at("score-field").hidden && at("score").checked ? "score" : null,
  headers,
  tell,
});
for (const id of ["model", "other"]) at(id).addEventListener("change", talk.update);
at("key").addEventListener("change", loadModels);
loadModels().catch((fault) => tell(`No answer from the server: ${fault.message}`));

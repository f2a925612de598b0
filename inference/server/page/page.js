// The chat page: talks to /v1/models, /v1/chat/completions and /score of the server that it came from, and to nothing else.
// All text is set as text, never as HTML: what a model writes cannot become part of the page.

const at = (id) => document.getElementById(id);
const make = (tag, className, text) => {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text ?? "";
  return node;
};

const turns = []; // {text, answers: [{model, text, node}]}
let asking = null; // the AbortController of the answers being written

function headers() {
  const key = at("key").value;
  return {"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})};
}

// The server's own words for what went wrong, and its status where it has none.
async function refusal(answer) {
  try {
    const body = await answer.json();
    return body.error?.message ?? body.detail ?? `the server answered ${answer.status}`;
  } catch {
    return `the server answered ${answer.status}`;
  }
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

// What `model` was told and said before turn number `end`; a model sees its own answers alone.
function messagesFor(model, end) {
  const system = at("system").value.trim();
  const messages = system ? [{role: "system", content: system}] : [];
  for (const turn of turns.slice(0, end)) {
    const said = turn.answers.find((answer) => answer.model === model) ?? turn.answers[0];
    messages.push({role: "user", content: turn.text}, {role: "assistant", content: said.text});
  }
  return [...messages, {role: "user", content: turns[end].text}];
}

// The data of server-sent events, one JSON value each, until [DONE].
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function write(answer, index, signal) {
  const request = {
    model: answer.model, messages: messagesFor(answer.model, index), stream: true,
    temperature: Number(at("temperature").value), top_p: Number(at("top_p").value),
    max_tokens: Number(at("max_tokens").value), seed: Number(at("seed").value) + index + (turns[index].tries ?? 0) * 1000,
  };
  const reply = await fetch("v1/chat/completions",
    {method: "POST", headers: headers(), body: JSON.stringify(request), signal});
  if (!reply.ok) throw new Error(await refusal(reply));
  for await (const event of events(reply.body)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices?.[0];
    if (!choice) continue;
    answer.text += choice.delta?.content ?? "";
    answer.said.textContent = answer.text;
    if (choice.finish_reason === "length") note(answer, "cut at its longest length");
    follow();
  }
}

function note(answer, text, isFault) {
  answer.who.append(make("span", isFault ? "note fault" : "note", text));
}

// Keep the newest text in view, unless the reader has scrolled up.
function follow() {
  const log = at("log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
}

async function score(answer, index) {
  if (at("score-field").hidden || !at("score").checked || !answer.text) return;
  const prompt = messagesFor(answer.model, index);
  const reply = await fetch("score", {method: "POST", headers: headers(), body: JSON.stringify(
    {prompts: [prompt], completions: [[{role: "assistant", content: answer.text}]]})});
  if (!reply.ok) return note(answer, `no score: ${await refusal(reply)}`, true);
  note(answer, `score ${(await reply.json()).scores[0].toFixed(2)}`);
}

async function fill(answer, index, signal) {
  answer.node.classList.add("busy");
  try {
    await write(answer, index, signal);
    await score(answer, index);
  } catch (fault) {
    if (fault.name === "AbortError") note(answer, "stopped");
    else note(answer, fault.message, true);
  } finally {
    answer.node.classList.remove("busy");
  }
}

function show(turn) {
  const section = make("section", "turn");
  const mine = make("div", "mine");
  mine.append(make("h2", "who", "You"), make("p", "said", turn.text));
  const answers = make("div", "answers");
  for (const answer of turn.answers) {
    answer.node = make("article", "answer");
    answer.who = make("h3", "who", answer.model);
    answer.said = make("p", "said");
    answer.node.append(answer.who, answer.said);
    answers.append(answer.node);
  }
  section.append(mine, answers);
  turn.node?.replaceWith(section);
  if (!turn.node) at("log").append(section);
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
  await Promise.all(turns[index].answers.map((answer) => fill(answer, index, asking.signal)));
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

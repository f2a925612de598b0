// What the chat page and the studio's chat do alike: say what was said, ask for an answer, and show it as it comes.
// A turn is {text, answers: [{model, text}], kept}: kept is the answer that all models go on from, if one was chosen.
// All text is set as text, never as HTML: what a model writes cannot become part of the page.

const make = (tag, className, text) => {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text ?? "";
  return node;
};

// What `model` is asked in turn number `end`; it sees its own answers alone, but where one was kept.
export function messagesFor(turns, end, model, system) {
  const messages = system ? [{role: "system", content: system}] : [];
  for (const turn of turns.slice(0, end)) {
    const said = turn.kept ?? turn.answers.find((answer) => answer.model === model) ?? turn.answers[0];
    messages.push({role: "user", content: turn.text}, {role: "assistant", content: said.text});
  }
  return [...messages, {role: "user", content: turns[end].text}];
}

// A turn's section; each answer has then a node, who said it and what was said.
export function layOut(turn) {
  const section = make("section", "turn");
  const mine = make("div", "mine");
  mine.append(make("h2", "who", "You"), make("p", "said", turn.text));
  const answers = make("div", "answers");
  for (const answer of turn.answers) {
    answer.node = make("article", "answer");
    answer.who = make("h3", "who", answer.model);
    answer.said = make("p", "said", answer.text);
    answer.node.append(answer.who, answer.said);
    for (const each of answer.notes ?? []) show(answer, ...each);
    answers.append(answer.node);
  }
  section.append(mine, answers);
  return section;
}

// A remark beside who said it.
export function note(answer, text, isFault) {
  (answer.notes ??= []).push([text, isFault]);
  show(answer, text, isFault);
}

function show(answer, text, isFault) {
  answer.who.append(make("span", isFault ? "note fault" : "note", text));
}

// Keep the newest text of a box that scrolls in view, unless the reader has scrolled up.
export function follow(box) {
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
}

// Write `answer` as the server gives it (isWhole: it came to its own end), then its score. asking: {request, chat and score (addresses, score null for
// none), headers, signal, grew: called after each piece}. What goes wrong is a note of the answer.
export async function fill(answer, asking) {
  answer.node.classList.add("busy");
  try {
    await write(answer, asking);
    if (asking.score && answer.text) await score(answer, asking);
  } catch (fault) {
    if (fault.name === "AbortError") note(answer, "stopped");
    else note(answer, fault.message, true);
  } finally {
    answer.node.classList.remove("busy");
  }
}

async function write(answer, {request, chat, headers, signal, grew}) {
  const reply = await fetch(chat, {method: "POST", headers, body: JSON.stringify({...request, stream: true}), signal});
  if (!reply.ok) throw new Error(await refusal(reply));
  for await (const event of events(reply.body)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices?.[0];
    if (!choice) continue;
    answer.text += choice.delta?.content ?? "";
    answer.said.textContent = answer.text;
    answer.isWhole ||= choice.finish_reason === "stop";
    if (choice.finish_reason === "length") note(answer, "cut at its longest length");
    grew?.();
  }
}

async function score(answer, {request, score: address, headers}) {
  const reply = await fetch(address, {method: "POST", headers, body: JSON.stringify(
    {prompts: [request.messages], completions: [[{role: "assistant", content: answer.text}]]})});
  if (!reply.ok) return note(answer, `no score: ${await refusal(reply)}`, true);
  note(answer, `score ${(await reply.json()).scores[0].toFixed(2)}`);
}

// The server's own words for what went wrong, and its status where it has none.
export async function refusal(reply) {
  try {
    const body = await reply.json();
    return body.error?.message ?? body.error ?? body.detail ?? `the server answered ${reply.status}`;
  } catch {
    return `the server answered ${reply.status}`;
  }
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

// What the chat page and the studio's chat share: a conversation, whose answers are shown as they come.
// A turn is {text, pictures: [{name, url}], answers: [{model, text}], kept, tries}: kept is the answer that all models
// go on from, if one was chosen; tries, how often it was answered again.
// All text is set as text, never as HTML: what a model writes cannot become part of the page.

const make = (tag, className, text, ...children) => {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text ?? "";
  node.append(...children);
  return node;
};

// A conversation in the nodes of `view`: {log, empty, form, message, attach, files, attached, send, stop, again, fresh},
// and second where another answer beside the last one can be asked for.
// page: {turns, pictures (of the next question), isOpen() (whether questions are taken), models() -> names, reads(model)
// (whether it reads images), load() where there are none, settings() -> {system, seed, and what
// else a request has}, chat and score() (addresses; null for no score), headers(), tell(text), answered(turn)}.
// Returns {place(turn), update(), leave()}.
export function converse(view, page) {
  const {turns} = page, attaching = attach(view, page, () => update());
  let asking = null; // the AbortController of the answers being written

  function update() {
    const isFree = page.isOpen() && asking === null && !attaching.isReading();
    view.send.disabled = !isFree;
    for (const each of [view.again, view.second]) if (each) each.disabled = !isFree || !turns.length;
    view.stop.disabled = asking === null;
    view.log.setAttribute("aria-busy", String(asking !== null));
    view.empty.hidden = turns.length > 0;
    attaching.update();
  }

  function place(turn) {
    const section = layOut(turn);
    if (turn.node?.parentNode === view.log) turn.node.replaceWith(section);
    else view.log.append(section);
    turn.node = section;
    view.log.scrollTop = view.log.scrollHeight;
  }

  async function answerLast(before = []) {
    const index = turns.length - 1, turn = turns[index], asked = asking = new AbortController();
    turn.kept = undefined;
    const fresh = page.models().map((model) => ({model, text: ""}));
    turn.answers = [...before, ...fresh];
    place(turn);
    update();
    page.tell("Answering. Escape stops.");
    const {system, seed, ...rest} = page.settings();
    const common = {chat: page.chat, score: page.score(), signal: asked.signal, grew: () => follow(view.log),
      headers: {"Content-Type": "application/json", ...page.headers?.()}};
    await Promise.all(fresh.map((answer) => {
      answer.asked = messagesFor(turns, index, answer.model, system.trim());
      return fill(answer, {...common, request: {...rest, model: answer.model, messages: answer.asked,
        seed: seed + index + (turn.tries ?? 0) * 1000}});
    }));
    if (asking !== asked) return; // the page was left
    asking = null;
    page.answered?.(turn);
    follow(view.log);
    update();
    page.tell(turns.length ? "Answered." : "");
  }

  view.form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = view.message.value.trim();
    if (!text || asking || attaching.isReading() || !page.isOpen()) return;
    if (!page.models().length) return void page.load();
    view.message.value = "";
    turns.push({text, pictures: attaching.take(), answers: []});
    answerLast();
  });
  view.message.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    view.form.requestSubmit();
  });
  const stop = () => asking?.abort();
  const escape = (event) => event.key === "Escape" && stop();
  document.addEventListener("keydown", escape);
  view.stop.addEventListener("click", stop);
  const again = (before) => {
    turns.at(-1).tries = (turns.at(-1).tries ?? 0) + 1;
    answerLast(before);
  };
  view.again.addEventListener("click", () => again());
  view.second?.addEventListener("click", () => again(turns.at(-1).answers)); // beside those that are there
  view.fresh.addEventListener("click", () => {
    stop();
    for (const turn of turns.splice(0)) turn.node.remove();
    update();
    page.tell("");
    view.message.focus();
  });
  return {place, update, leave: () => {
    document.removeEventListener("keydown", escape);
    attaching.leave();
    stop();
    asking = null;
  }};
}

// ---- pictures of a question, sent as data URLs

const MAX_PICTURES = 16, MAX_PIXELS = 2 ** 20; // that the server takes at once; that it reads of one

const strip = (pictures) => make("div", "pictures", "", ...pictures.map(({name, url}) => {
  const image = make("img", "");
  return Object.assign(image, {alt: name, title: name, src: url});
}));

// The picture in a file: its own bytes, or a JPEG in fewer pixels where it has more than the server reads.
async function read(file) {
  const bitmap = await createImageBitmap(file), {width, height} = bitmap;
  const scale = Math.sqrt(MAX_PIXELS / (width * height));
  if (scale >= 1) {
    const reader = new FileReader(), done = new Promise((resolve) => (reader.onload = resolve));
    reader.readAsDataURL(file);
    await done;
    return {name: file.name, url: reader.result, about: `${width} x ${height}`};
  }
  const canvas = Object.assign(document.createElement("canvas"),
    {width: Math.max(1, Math.floor(width * scale)), height: Math.max(1, Math.floor(height * scale))});
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return {name: file.name, url: canvas.toDataURL("image/jpeg", 0.95),
    about: `${width} x ${height}, scaled down to ${canvas.width} x ${canvas.height}`};
}

// Choose, drop or paste pictures for the next question; changed() is called when reading them begins and ends. Returns
// {take() -> pictures, isReading(), update(), leave()}.
function attach(view, page, changed) {
  const {pictures} = page;
  let reading = 0;
  const blind = () => page.models().filter((model) => !page.reads(model));

  function update() {
    view.attach.hidden = !page.models().length || blind().length > 0;
    view.attached.hidden = !pictures.length;
    view.attached.replaceChildren(...pictures.map((picture) => {
      const item = strip([picture]), remove = make("button", "", "Remove");
      Object.assign(remove, {type: "button", ariaLabel: `Remove ${picture.name}`, onclick: () => {
        pictures.splice(pictures.indexOf(picture), 1);
        update();
        view.message.focus();
      }});
      item.append(remove);
      return item;
    }));
  }

  async function add(files) {
    if (!files.length) return;
    if (blind().length) return page.tell(`${blind().join(" and ")} reads no images.`);
    const told = [];
    reading += 1;
    changed();
    for (const file of files) {
      try {
        const picture = await read(file);
        if (pictures.length === MAX_PICTURES) throw new Error(`left out: ${MAX_PICTURES} pictures at most`);
        pictures.push(picture);
        told.push(`${file.name}, ${picture.about}`);
      } catch (fault) {
        told.push(`${file.name}: ${fault.name === "Error" ? fault.message : "this browser reads no picture from it"}`);
      }
    }
    reading -= 1;
    changed();
    page.tell(told.join("; "));
    view.message.focus();
  }

  view.attach.addEventListener("click", () => view.files.click());
  view.files.addEventListener("change", () => {
    add([...view.files.files]);
    view.files.value = "";
  });
  view.message.addEventListener("paste", (event) => add([...event.clipboardData.files]));
  const over = (event) => event.dataTransfer.types.includes("Files") && event.preventDefault();
  const drop = (event) => {
    over(event);
    add([...event.dataTransfer.files]);
  };
  document.addEventListener("dragover", over);
  document.addEventListener("drop", drop);
  return {take: () => pictures.splice(0), isReading: () => reading > 0, update, leave: () => {
    document.removeEventListener("dragover", over);
    document.removeEventListener("drop", drop);
  }};
}

// ---- answers

// A question as the content of a message.
const content = ({text, pictures}) => (pictures?.length ? [
  ...pictures.map(({url}) => ({type: "image_url", image_url: {url}})), {type: "text", text}] : text);

// The messages to `model` in turn number `end`; it sees its own answers alone, except where one was kept.
function messagesFor(turns, end, model, system) {
  const messages = system ? [{role: "system", content: system}] : [];
  for (const turn of turns.slice(0, end)) {
    const answer = turn.kept ?? turn.answers.find((each) => each.model === model) ?? turn.answers[0];
    messages.push({role: "user", content: content(turn)}, {role: "assistant", content: answer.text});
  }
  return [...messages, {role: "user", content: content(turns[end])}];
}

// The section of a turn; gives each answer its nodes: node, who (its heading) and said (its text).
function layOut(turn) {
  const section = make("section", "turn");
  const mine = make("div", "mine");
  mine.append(make("h2", "who", "You"), strip(turn.pictures ?? []), make("p", "said", turn.text));
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

// Add a remark to the heading of an answer.
export function note(answer, text, isFault) {
  (answer.notes ??= []).push([text, isFault]);
  show(answer, text, isFault);
}

// Take all remarks from the heading of an answer.
export function noNotes(answer) {
  answer.notes = [];
  for (const node of answer.who.querySelectorAll(".note")) node.remove();
}

function show(answer, text, isFault) {
  answer.who.append(make("span", isFault ? "note fault" : "note", text));
}

// Keep the newest text of a box that scrolls in view, unless the reader has scrolled up.
function follow(box) {
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
}

// Write `answer` as the server gives it (isWhole: it came to its own end), then its score. asking: {request, chat,
// score, headers, signal, grew() after each piece}. A fault becomes a note of the answer.
async function fill(answer, asking) {
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
  if (request.messages.some((message) => Array.isArray(message.content))) {
    return note(answer, "no score: the reward model reads no images");
  }
  const reply = await fetch(address, {method: "POST", headers, body: JSON.stringify(
    {prompts: [request.messages], completions: [[{role: "assistant", content: answer.text}]]})});
  if (!reply.ok) return note(answer, `no score: ${await refusal(reply)}`, true);
  note(answer, `score ${(await reply.json()).scores[0].toFixed(2)}`);
}

// The server's error message, or its status where there is none.
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

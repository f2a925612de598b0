// A model that learns while it is talked to: each mark trains it at once, in a run of its own.

import {button, list, make} from "./dom.js";
import {address} from "./format.js";
import {get, post} from "./server.js";

const SIGNS = {"+": "Good", "-": "Bad", "=": "Said better", "1/2": "Better of two"};

// The marks of the run that learns: {node, take(run), run(), isNew(), isBusy(), give, takeBack, isLearnt}. page: {turns,
// tell(text, isFault), changed() when learning begins and ends, placed(turn) to show a turn anew}.
export function lessons(page) {
  let run = null, marks = null, isBusy = false; // marks: null until they are loaded
  const about = make("p", {id: "lessons-about", role: "status"});
  const undo = button("Undo the last mark", () => takeBack(), {id: "lessons-undo"});
  const save = button("Save as a run", async () => {
    page.tell("Saving.");
    const line = await ask("/save");
    if (line === null) return;
    page.tell("");
    about.replaceChildren(`Saved, from ${counted()}: `, make("a", {href: `#/run/${address(run)}`}, run));
  }, {id: "lessons-save"});
  const shown = make("div.lessons");
  const node = make("section.marks", {"aria-label": "Learning", hidden: true}, about,
    make("div.buttons", {}, undo, save), shown);

  const counted = () => `${marks.length} ${marks.length === 1 ? "mark" : "marks"}`;

  function show(reply) {
    marks = reply.marks;
    about.textContent = marks.length ? `${counted()} learnt in ${run}` : `Marks train ${run} at once. None yet.`;
    shown.replaceChildren(list(marks.map(({sign, question, answer}) =>
      [make("strong", {}, SIGNS[sign]), ` ${question} `, make("span.quiet", {}, answer)]), "ol"));
    update();
  }

  function update() {
    undo.disabled = save.disabled = isBusy || !marks?.length;
    page.changed();
  }

  // What the server says it has done; null where it refuses, with the reason shown.
  async function ask(what, body = {}, refused = (text) => page.tell(text, true)) {
    if (isBusy) return refused("it still learns; wait a little"), null;
    isBusy = true;
    update();
    try {
      const reply = await post(`talk/v1/marks${what}`, body);
      show(reply);
      return reply.line;
    } catch (fault) {
      return refused(fault.message), null;
    } finally {
      isBusy = false;
      update();
    }
  }

  async function give(mark, answer) {
    const {text, original, thumb, thumbFile, lesson} = answer, notes = [...answer.notes ?? []]; // as they are now
    const {better, kept} = page.turns.find(({answers}) => answers.includes(answer)) ?? {};
    showLine(answer, "Learning ...");
    const line = await ask("", mark, (why) => showLine(answer, `Not learnt: ${why}`, true));
    if (line === null) return false;
    const {kind, rejected} = mark, before = {text, original, thumb, thumbFile, lesson, notes};
    answer.lesson = {run, number: marks.length, line, kind, rejected, before, turn: {better, kept}};
    showLesson(answer);
    answer.node.lastChild.scrollIntoView({block: "nearest"});
    for (const hint of document.querySelectorAll(".judge .hint")) hint.remove();
    return true;
  }

  // Whether the run has learnt `answer` as the better one over this text.
  const isLearnt = ({lesson}, text) => Boolean(lesson)
    && ((lesson.run === run && lesson.rejected === text) || isLearnt(lesson.before, text));

  // Take the last mark back, if it is the thumb on `answer` where one is given.
  async function takeBack(answer) {
    const number = marks?.length, isLast = ({lesson}) => lesson?.run === run && lesson.number === number;
    if (answer && !(isLast(answer) && answer.lesson.kind === "thumb")) {
      return page.tell("Only the last mark of the model that is open can be taken back.", true), false;
    }
    const line = await ask("/undo", {number, answer: marks?.at(-1)?.answer});
    if (line === null) return false;
    page.tell(line);
    for (const turn of page.turns) {
      for (const answer of turn.answers.filter(isLast)) {
        Object.assign(turn, answer.lesson.turn);
        Object.assign(answer, answer.lesson.before);
        page.placed(turn);
      }
    }
    return false; // the turn is shown anew
  }

  async function take(now) {
    if (now === run) return;
    [run, marks, node.hidden] = [now, null, !now];
    if (!run) return;
    try {
      const reply = await get("talk/v1/marks");
      if (run === now) show(reply);
    } catch (fault) {
      if (run === now) about.textContent = `The marks of ${now} are not shown: ${fault.message}`;
    }
  }

  return {node, take, give, takeBack, isLearnt, run: () => run, isNew: () => marks?.length === 0, isBusy: () => isBusy};
}

// The line of what a mark on this answer has changed.
export function showLesson(answer) {
  showLine(answer, answer.lesson?.line ?? "");
}

function showLine(answer, text, isFault = false) {
  answer.node.querySelector(".lesson")?.remove();
  if (text) answer.node.append(make(isFault ? "p.lesson.fault" : "p.lesson", {role: "status"}, text));
}

// Marks of answers, kept as data to train on: thumbs, a better answer, and which of several is better.

import {note, noNotes} from "./chat_stream.js";
import {button, make} from "./dom.js";
import {showLesson} from "./lessons.js";
import {get, post} from "./server.js";

let name = "marks"; // of the files; stays while the studio's page is open

// The line that counts the marks, and links to a training on them: {node, load, marked, tell, lessons}. model(): the
// run that is talked to; tell(text, isFault): shows whether a mark was kept; lessons: of a model that learns.
export function tally(model, tell, lessons) {
  const input = make("input", {id: "marks-name", value: name, maxlength: "80", onchange: () => {
    name = input.value.trim() || "marks";
    input.value = name;
    load().catch((fault) => tell(fault.message, true));
  }});
  const counts = make("p", {id: "marks-counts", role: "status"});
  const node = make("section.marks", {"aria-label": "Marks"}, make("label", {}, "Marks go to ", input), counts);

  function marked(totals) {
    const kinds = [["pairs", "pair", "dpo"], ["thumbs", "thumb", "kto"]].filter(([kind]) => totals[kind]);
    const links = kinds.map(([kind, one, stage]) => {
      const data = totals[`${kind}_path`];
      const query = new URLSearchParams({goal: "prefer", stage, data, ...(model() && {model: model()})});
      return make("a", {href: `#/new?${query}`}, `Train on ${totals[kind]} ${totals[kind] === 1 ? one : kind}`);
    });
    counts.replaceChildren(...(links.length ? links : ["Nothing is marked yet. Good and Bad train by KTO: "
      + "what is good becomes likelier. A better answer makes a pair, which trains by DPO: the better one over the other."]));
  }

  async function load() {
    const {files} = await get("marks");
    marked(files.find((file) => file.name === name) ?? {pairs: 0, thumbs: 0});
  }

  return {node, load, marked, tell, lessons};
}

// Send one mark on `answer`; returns whether it was kept, and shows why where the server refuses it. A model that
// learns gets it at once, and its run keeps it.
async function keep(mark, marks, answer) {
  if (mark.is_good === null && answer.thumbFile === null) return marks.lessons.takeBack(answer);
  if (marks.lessons.run() && mark.is_good !== null) {
    return marks.lessons.give({...mark, is_other_cut: mark.how === "edited" && !answer.isWhole}, answer);
  }
  try {
    marks.marked(await post("marks", {name, ...mark}));
    return true;
  } catch (fault) {
    marks.tell(`Not kept: ${fault.message}`, true);
    return false;
  }
}

// The buttons below the answers of a turn that have been written; marks: the tally.
export function judge(turn, marks) {
  const written = turn.answers.filter((answer) => answer.text.trim());
  const isOneQuestion = new Set(written.map((answer) => JSON.stringify(answer.asked))).size === 1;
  for (const answer of written) {
    const row = make("div.buttons.judge");
    answer.node.append(row);
    showLesson(answer);
    answer.buttons = row;
    const isOwn = answer.original === undefined; // the model's text, not a person's
    if (answer.isWhole && isOwn) row.append(...thumbs(answer, marks));
    row.append(better(answer, turn, marks));
    if (marks.lessons.isNew()) row.append(make("span.quiet.hint", {}, "tell it what you would have said"));
    if (written.length > 1 && isOneQuestion && isOwn && written.every((one) => one.isWhole)) {
      row.append(preferred(answer, turn, written, marks));
    }
    if (!answer.isWhole && isOwn) row.append(make("span.quiet.cut", {}, "cut off, so it cannot be judged"));
    else if (written.length > 1 && !isOneQuestion) {
      row.append(make("span.quiet", {}, "each model went on from its own answers, so these are no pair"));
    }
  }
}

function thumbs(answer, marks) {
  const buttons = [[true, "Good"], [false, "Bad"]].map(([isGood, text]) => {
    const thumb = button(text, async () => {
      const label = thumb.getAttribute("aria-pressed") === "true" ? null : isGood;
      const file = (typeof answer.thumb === "boolean" && answer.thumbFile) || name; // where the mark is, if there is one
      const mark = {name: file, kind: "thumb", prompt: answer.asked, completion: answer.text, is_good: label};
      if (!await keep(mark, marks, answer)) return;
      Object.assign(answer, {thumb: label, thumbFile: marks.lessons.run() ? null : file}); // null: a run has it
      for (const [i, thumb] of buttons.entries()) thumb.setAttribute("aria-pressed", String(label === (i === 0)));
      marks.tell(label === null ? "Taken back." : `Marked ${isGood ? "good" : "bad"}.`);
    }, {"aria-pressed": String(answer.thumb === isGood)});
    return thumb;
  });
  return buttons;
}

// "This one is better": a pair with each of the others, and all models go on from it.
function preferred(answer, turn, written, marks) {
  const choose = button("This one is better", async () => {
    const others = written.filter((one) => one !== answer && one.text !== answer.text);
    for (const other of others) {
      if (marks.lessons.isLearnt(answer, other.text)) continue; // pressed before, or two are alike
      const mark = {kind: "pair", how: "compared", prompt: answer.asked, chosen: answer.text, rejected: other.text};
      if (!await keep(mark, marks, answer)) return;
    }
    turn.kept = turn.better = answer;
    for (const node of turn.node.querySelectorAll(".preferred")) {
      node.setAttribute("aria-pressed", String(node === choose));
    }
    const which = others.some((one) => one.model === answer.model) ? "this one" : answer.model;
    const [kept, on] = [`Kept: ${which} was better.`, "The conversation goes on from its answer."];
    marks.tell(`${others.length ? kept : "Nothing is kept: the answers are equal, and make no pair."} ${on}`);
  }, {class: "preferred", "aria-pressed": String(turn.better === answer)});
  return choose;
}

// "Say it better": the answer in a text box; what is saved is preferred to the model's answer.
function better(answer, turn, marks) {
  const edit = button("Say it better", () => {
    const box = make("textarea", {rows: "4", "aria-label": `A better answer than ${answer.model}'s`});
    const close = () => {
      form.remove();
      answer.said.hidden = answer.buttons.hidden = false;
      edit.focus();
    };
    const form = make("form.edit", {
      onkeydown: (event) => {
        if (event.key !== "Escape") return;
        event.stopPropagation();
        close();
      },
      onsubmit: async (event) => {
        event.preventDefault();
        if (await rewrite(answer, turn, box.value, marks)) close();
      }}, box, make("div.buttons", {}, make("button", {type: "submit"}, "Save"), button("Cancel", close)));
    box.value = answer.text;
    answer.said.hidden = answer.buttons.hidden = true;
    answer.said.after(form);
    box.focus();
  });
  return edit;
}

async function rewrite(answer, turn, text, marks) {
  const original = answer.original ?? answer.text;
  const mark = {kind: "pair", how: "edited", prompt: answer.asked, chosen: text, rejected: original};
  if (!await keep(mark, marks, answer)) return false;
  noNotes(answer); // they were about another text, as the buttons were
  note(answer, "edited");
  Object.assign(answer, {original, text});
  answer.said.textContent = text;
  turn.kept = answer;
  for (const node of answer.buttons.querySelectorAll("[aria-pressed], .cut")) node.remove();
  marks.tell("Kept: your words are preferred to the model's, and the conversation goes on from them.");
  return true;
}

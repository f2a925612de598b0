// What a judge is asked to look at: the general rubric, a file, or questions that are written here.

import {make} from "./dom.js";
import {frame, radios, textInput} from "./field_frame.js";
import {YES_NO} from "./run_settings.js";

export function rubricPart(draft, judge, set) {
  const place = make("div");
  const show = () => place.replaceChildren(...parts(draft, judge, set));
  const kinds = radios("rubric", {text: "What does it look at?"}, [
    {value: "general", title: "Whether the answer does what was asked, is correct and clear"},
    {value: "own", title: "My own questions"}, {value: "file", title: "A rubric file (YAML)"}], judge().rubric, (rubric) => {
    set({rubric});
    show();
  });
  show();
  return make("div", {}, kinds, place);
}

function parts(draft, judge, set) {
  if (judge().rubric === "general") return [];
  if (judge().rubric === "file") {
    return [frame(draft, "reward.judge.rubric", "Rubric file", textInput({value: judge().file, placeholder: "rubric.yaml",
      set: (file) => set({file})})).node];
  }
  const list = make("div");
  const show = (focus = null) => {
    list.replaceChildren(...judge().items.map((item, i) => itemRow(judge, set, show, item, i)));
    if (focus !== null) list.children[Math.min(focus, judge().items.length - 1)]?.querySelector("input").focus();
  };
  const add = make("button", {type: "button", onclick: () => {
    set({items: [...judge().items, {question: "", kind: "0-10", weight: 1}]});
    show(judge().items.length - 1);
  }}, "Add a question");
  show();
  const about = frame(draft, "reward.judge.rubric", "What the judge should know of the task", textInput({value: judge().instructions,
    set: (instructions) => set({instructions}), placeholder: "The response explains something in two or three sentences."}), {isWide: true});
  return [about.node, make("p.help", {}, "Ask so that yes, or 10, is good."), list, make("div.buttons", {}, add)];
}

function itemRow(judge, set, show, item, i) {
  const change = (patch) => set({items: judge().items.map((each, j) => (j === i ? {...each, ...patch} : each))});
  const kind = make("select", {"aria-label": `Kind of question ${i + 1}`, onchange: () => change({kind: kind.value})},
    make("option", {value: "0-10"}, "0 to 10"), make("option", {value: YES_NO}, "yes or no"));
  kind.value = item.kind;
  const weight = make("input", {type: "number", min: "0", step: "any", value: item.weight, "aria-label": `Weight of question ${i + 1}`,
    oninput: () => change({weight: Number(weight.value) || 0})});
  const away = make("button", {type: "button", "aria-label": `Remove question ${i + 1}`, onclick: () => {
    set({items: judge().items.filter((_, j) => j !== i)});
    show(i);
  }}, "Remove");
  return make("div.rubric-item", {}, textInput({value: item.question, set: (question) => change({question}),
    placeholder: "How correct is the explanation?", "aria-label": `Question ${i + 1}`}), kind, make("label", {}, "weight ", weight), away);
}

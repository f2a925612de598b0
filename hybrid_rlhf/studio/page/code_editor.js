// A reward function that is written in the page: templates, a try-out on the first rows, and where it is kept.

import {button, make, select, table} from "./dom.js";
import {number} from "./format.js";
import {postWithToken} from "./server.js";
import {dataKeys, sourceOf} from "./settings.js";

// prompts, completions and every column of the data come as lists of one length; a list of numbers goes back.
const HEAD = `import re

def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]

def reward(prompts, completions, **columns):
`;
const TEMPLATES = {
  "A pattern (regex)": `    """1 where the answer ends with a number after ####, else 0."""
    return [float(bool(re.search(r"#### *-?\\d+ *$", text_of(c)))) for c in completions]
`,
  "A number": `    """1 where the last number of the answer is that of the column answer, else 0."""
    def last(text):
        return (re.findall(r"-?\\d+(?:\\.\\d+)?", str(text)) or [None])[-1]
    return [float(last(text_of(c)) == last(a)) for c, a in zip(completions, columns["answer"])]
`,
  "A length": `    """1 for 50 words or fewer, less for each one more, 0 from 100 on."""
    return [min(1.0, max(0.0, 2 - len(text_of(c).split()) / 50)) for c in completions]
`};
let token = ""; // stays while the studio's page is open

// keep(text): take FILE:NAME of the function that was kept.
export function codeEditor(draft, keep) {
  const code = make("textarea.code", {rows: "14", spellcheck: "false", autocomplete: "off", id: "code",
    oninput: () => draft.update({code: code.value})}, draft.state.code);
  const field = (id, label, properties) => {
    const input = make("input", {id, autocomplete: "off", spellcheck: "false", ...properties});
    return [input, make("div.entry", {}, make("label", {for: id}, label), input)];
  };
  const fill = () => {
    if (draft.state.code && !confirm("Replace the function that you wrote?")) return;
    draft.update({code: ""});
    code.value = HEAD + TEMPLATES[template.value];
  };
  const template = select({id: "code-template", onchange: fill}, Object.keys(TEMPLATES).map((key) => [key, key]));
  const [answer, answerNode] = field("code-answer", "Answer to score (empty: each row's own)", {});
  const [secret, secretNode] = field("code-token", "The studio's token, at the end of the address that it printed",
    {type: "password", value: token, oninput: () => (token = secret.value.trim())});
  const result = make("div", {role: "status"});
  const act = (path, body, show) => async () => {
    result.replaceChildren(make("p.help", {}, "Working …"));
    try {
      result.replaceChildren(show(await postWithToken(`reward/${path}`, body(), token)));
    } catch (fault) {
      result.replaceChildren(make("p.fault", {}, fault.message));
    }
  };
  const attempt = act("try", () => {
    const source = sourceOf(draft.state.data[dataKeys(draft.state)[0][0]]);
    if (!source) throw new Error("Give the data first: its first rows are scored.");
    return {code: code.value, source, answer: answer.value};
  }, ({rows}) => table([{title: "Prompt", cell: (row) => row.prompt, kind: ".said"},
    {title: "Answer", cell: (row) => row.answer || "(empty)", kind: ".said"},
    {title: "Score", isNumber: true, cell: ({score}) => (score === null ? "none" : number(score))}], rows, "Scores"));
  const save = act("keep", () => ({code: code.value}), (kept) => {
    keep(kept.function);
    return make("p.verdict.good", {}, `✓ Kept, and used by this run: ${kept.function}`);
  });
  if (!draft.state.code) code.value = HEAD + TEMPLATES[template.value];
  return make("details.more", {}, make("summary", {}, "Write a function here"),
    make("p.help", {}, "reward(prompts, completions, **columns) gets lists of one length: the prompts, the answers, "
      + "and every column of your data. It returns a list with a number for each answer; None leaves one out."),
    make("div.entry", {}, make("label", {for: "code-template"}, "Begin with"), template),
    make("div.entry", {}, make("label", {for: "code"}, "The function, in Python"), code),
    make("div.fields", {}, answerNode, secretNode),
    make("div.buttons", {}, button("Try on the first rows", attempt), button("Keep and use it", save)), result);
}

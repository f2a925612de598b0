// Step 3: the data. A file that is dropped or chosen, or a path or hub id; what was found in it, and whether it fits.

import {make} from "./dom.js";
import {get, upload} from "./server.js";
import {frame, radios, suggestions, textInput} from "./field_frame.js";
import {columnsOf, dataKeys, sourceOf} from "./run_settings.js";
import {size} from "./amounts.js";

const DEMOS = {imitate: "demo/demonstrations", prefer: "demo/preferences", three_stages: "demo/preferences",
  sft: "demo/demonstrations", reward: "demo/preferences", ppo: "demo/prompts"};
const LABELS = {data: "File, folder or hub id", sft: "Answers to imitate", reward: "Pairs: a better and a worse answer",
  ppo: "Prompts to practise on"};
const ACCEPT = ".jsonl,.json,.csv,.parquet,.txt";
const WAIT = 500; // milliseconds after the last key

export function dataStep(draft) {
  const place = make("div");
  const show = () => place.replaceChildren(...dataKeys(draft.state).map(([key, stage]) => dataField(draft, key, stage)));
  const parts = [make("p", {}, `Needed: ${draft.goal.rows}`)];
  if (draft.state.stage === "all") {
    parts.push(radios("data-kind", {text: "How are the rows kept?"}, [
      {value: "one", title: "One file of pairs for all three stages", help: "Its prompts are dealt out, so that no stage sees another's."},
      {value: "three", title: "A file for each stage"}], draft.state.isSplit ? "three" : "one", (kind) => {
      draft.update({isSplit: kind === "three"});
      show();
      draft.emit("look");
    }));
  }
  show();
  return make("div", {}, ...parts, place, suggestions("data-known", known(draft)));
}

function known(draft) {
  const files = draft.uploads.map(({path, name, bytes}) => ({value: path, label: `uploaded: ${name}, ${size(bytes)}`}));
  return [...files, ...[...new Set(Object.values(DEMOS))].map((value) => ({value, label: "built-in demo data"}))];
}

function dataField(draft, key, stage) {
  const source = () => draft.state.data[key];
  const found = make("div.data-found", {role: "status"});
  const looking = {timer: null, turn: 0};
  const look = (wait) => {
    clearTimeout(looking.timer);
    delete draft.looks[key];
    looking.timer = setTimeout(() => lookAt(draft, key, stage, found, looking), wait);
  };
  const set = (patch) => {
    draft.update({data: {...draft.state.data, [key]: {...source(), ...patch}}});
    look(WAIT);
  };
  const input = textInput({value: source().path, list: "data-known", placeholder: "rows.jsonl, a folder or a hub id",
    set: (path) => set({path})});
  const take = (path) => {
    input.value = path;
    set({path});
  };
  const takeDemo = () => {
    take(DEMOS[key] ?? DEMOS[draft.state.goal] ?? "demo/prompts");
    if (!draft.asks.includes("reward_functions") || draft.state.functions.length) return;
    document.getElementById("reward-demo_correct")?.click(); // what can score the answers to it
    input.focus();
  };
  const offer = make("p.offers", {}, "Nothing at hand? ", make("button.quiet-button", {type: "button", onclick: takeDemo},
    "Take the built-in demo data"), ".");
  const more = moreFields(draft, key, source, set);
  const option = key === "data" ? "data.sources" : `data.sources.${key}`;
  const field = frame(draft, option, LABELS[key], input, {isWide: true, after: [dropArea(draft, key, take), offer, more, found]});
  if (source().path) look(0);
  return field.node;
}

function moreFields(draft, key, source, set) {
  const one = (name, label, help, placeholder) => frame(draft, `data.sources.${key}.${name}`, label,
    textInput({value: source()[name], set: (text) => set({[name]: text}), placeholder}), {help}).node;
  return make("details.more", {open: Boolean(source().name || source().split || source().columns)},
    make("summary", {}, "Subset, split, and columns of other names"),
    make("div.fields", {}, one("name", "Subset", "Of a hub data set that has several, or a folder's subfolder.", "main"),
      one("split", "Split", "Of a hub data set; train where nothing is said.", "train"),
      one("columns", "Columns", "Our name: yours, separated by commas.", "prompt: question, completion: answer")));
}

function dropArea(draft, key, take) {
  const says = make("span.help", {role: "status"});
  const id = `file-${key}`;
  const chooser = make("input", {type: "file", id, accept: ACCEPT, class: "hidden", onchange: () => send(chooser.files[0])});
  const send = async (file) => {
    if (!file) return;
    says.className = "help";
    says.textContent = `Sending ${file.name} (${size(file.size)}) …`;
    try {
      const {path, name} = await upload(file);
      says.textContent = `${name} is in the studio's folder.`;
      take(path);
      draft.uploads = (await get("uploads").catch(() => ({files: draft.uploads}))).files;
      document.getElementById("data-known")?.replaceWith(suggestions("data-known", known(draft)));
    } catch (fault) {
      says.className = "fault";
      says.textContent = `${file.name}: ${fault.message}`;
    }
    chooser.value = "";
  };
  const area = make("div.file-drop", {
    ondragover: (event) => {
      event.preventDefault();
      area.classList.add("over");
    },
    ondragleave: () => area.classList.remove("over"),
    ondrop: (event) => {
      event.preventDefault();
      area.classList.remove("over");
      send(event.dataTransfer.files[0]);
    }}, chooser, make("label.file-button", {for: id}, "Choose a file"), make("span.help", {}, " or drop it here: jsonl, json, csv, parquet or txt "), says);
  return area;
}

async function lookAt(draft, key, stage, found, looking) {
  const source = sourceOf(draft.state.data[key]);
  const mine = ++looking.turn;
  if (!source) {
    found.replaceChildren();
    draft.emit("look");
    return;
  }
  found.style.setProperty("min-height", `${found.offsetHeight}px`); // what is below stays where it is meanwhile
  found.replaceChildren(make("p.help", {}, "Looking at the rows …"));
  const answer = await draft.lookAt({...source, stage}).catch((fault) => ({fits: false, why: fault.message}));
  if (mine !== looking.turn || draft.isClosed) return;
  draft.looks[key] = {...answer, isRefused: !answer.fits && !answer.columns?.length};
  found.style.removeProperty("min-height");
  found.replaceChildren(...seen(draft.looks[key], draft.state.data[key]));
  draft.emit("look");
}

function seen(answer, {columns}) {
  const verdict = answer.fits ? make("p.verdict.good", {}, "✓ These rows fit.") :
    make("p.verdict.fault", {}, answer.isRefused ? "✗ They cannot be read." : "✗ These rows do not fit.");
  const why = answer.why ? make(answer.fits ? "p.help" : "p.fault", {}, answer.why) : null;
  if (answer.isRefused) return [verdict, why].filter(Boolean);
  const facts = [["Format", answer.format], ["Rows", answer.rows?.toLocaleString("en")], ["Columns", answer.columns?.join(", ")]];
  const list = make("dl.facts", {}, ...facts.filter(([, value]) => value).flatMap(([name, value]) =>
    [make("dt", {}, name), make("dd", {}, value)]));
  const renamed = Object.keys(columnsOf(columns)).length ? make("p.help", {}, "Your names of the columns are taken into account.") : null;
  const rows = answer.first?.length ? make("details", {}, make("summary", {}, `The first ${answer.first.length} rows`),
    ...answer.first.map((row, i) => make("pre.data-row", {tabindex: "0", role: "region", "aria-label": `Row ${i + 1}`}, row))) : null;
  return [verdict, why, list, renamed, rows].filter(Boolean);
}

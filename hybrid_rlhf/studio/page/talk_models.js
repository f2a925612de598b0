// Which models are talked to: choose, open, and what becomes of that.

import {make} from "./dom.js";
import {get, post} from "./server.js";

const MOST = 3;

// told(state): called with each new state of the server's; wanted: ids to choose at first. -> {node, load, update, leave}.
export function chooser(told, wanted) {
  const view = build();
  let state = null;
  let turn = 0;
  let since = 0; // when the present opening began, as this page saw it

  async function load() {
    const [{models}, found] = await Promise.all([get("talk/models"), get("talk")]);
    const policies = models.filter((each) => each.kind === "policy");
    const chosen = wanted.length ? wanted : found.models.map((each) => each.id);
    view.selects.forEach((select, i) => fillSelect(select, i ? "nothing" : null, policies, chosen[i]));
    fillSelect(view.reward, "no scores", models.filter((each) => each.kind !== "policy"));
    view.empty.hidden = policies.length > 0;
    view.onCpu.checked = found.models.length ? found.is_on_cpu : models.some((each) => each.status === "running");
    showMore(view);
    take(found);
    const isThere = found.state !== "closed" && wanted.every((id) => found.models.some((each) => each.id === id));
    if (wanted.length && !isThere) await open(); // who comes from a run's page talks to that run
  }

  // The newest question's answer counts: an older one may come later, and would say "opening" of what is open.
  async function update() {
    const mine = ++turn, found = await get("talk");
    if (mine === turn) take(found);
  }

  function take(found) {
    const before = state?.state;
    if (found.state === "starting" && before !== "starting") since = Date.now();
    state = found;
    if (found.state !== before && found.state !== "starting") fold(found.state === "ready");
    view.onCpu.parentNode.hidden = !found.has_card;
    view.close.disabled = !["starting", "ready"].includes(found.state);
    view.state.textContent = words(found);
    view.state.classList.toggle("fault", found.state === "failed");
    view.notes.replaceChildren(...found.notes.map((line) => make("li", {}, line)));
    count();
    told(found);
  }

  // The choice makes room for the conversation; who was at it goes on there.
  function fold(isReady) {
    const wasHere = view.details.contains(document.activeElement);
    view.details.open = !isReady;
    if (isReady && wasHere) view.details.querySelector("summary").focus();
  }

  function count() {
    const seconds = Math.round((Date.now() - since) / 1000);
    view.seconds.textContent = state?.state === "starting" && seconds > 0 ? `${seconds} s` : "";
  }

  async function open() {
    const models = [...new Set(view.selects.map((select) => select.value).filter(Boolean))];
    const reward = view.reward.value || null;
    await act(() => post("talk/open", {models, reward, is_on_cpu: view.onCpu.checked && !view.onCpu.parentNode.hidden}));
  }

  async function act(call) {
    try {
      await call();
      await update();
    } catch (fault) {
      view.state.textContent = fault.message;
      view.state.classList.add("fault");
    }
  }

  view.form.addEventListener("submit", (event) => {
    event.preventDefault();
    open();
  });
  view.close.addEventListener("click", () => act(() => post("talk/close")));
  for (const select of view.selects) select.addEventListener("change", () => showMore(view));
  const clock = setInterval(count, 1000);
  return {node: view.node, load, update, leave: () => clearInterval(clock)};
}

function words(state) {
  const names = state.models.map((each) => (each.step === null ? each.id : `${each.id} at step ${each.step}`)).join(", ");
  if (state.state === "ready") return `Open: ${names}.`;
  if (state.state === "starting") return `Opening: ${state.doing} ...`;
  if (state.state === "failed") return `It cannot be opened: ${state.error}`;
  return "No model is open.";
}

function build() {
  const selects = ["Model", "Compare with", "And with"].slice(0, MOST).map((text, i) => {
    const select = make("select", {id: `talk-model-${i + 1}`, required: i === 0});
    return {select, label: make("label", {hidden: i > 1}, `${text} `, select)};
  });
  const reward = make("select", {id: "talk-reward"});
  const onCpu = make("input", {id: "talk-cpu", type: "checkbox"});
  const close = make("button", {type: "button", id: "talk-close", disabled: true}, "Close");
  const state = make("p", {id: "talk-state", role: "status"});
  const seconds = make("span.quiet", {"aria-hidden": "true"});
  const notes = make("ul.quiet", {id: "talk-notes"});
  const empty = make("p", {id: "talk-empty", hidden: true}, "There is no run with a model yet: ",
    make("a", {href: "#/new"}, "begin one"), ".");
  const form = make("form", {"aria-label": "Models"}, empty,
    make("div.fields", {}, ...selects.map((each) => each.label), make("label", {}, "Reward model ", reward)),
    make("label.check", {hidden: true}, onCpu, " Answer on the processor: slower, and it leaves the card to the training"),
    make("div.buttons", {}, make("button", {type: "submit", id: "talk-open"}, "Open"), close));
  const details = make("details", {id: "talk-choice", open: true}, make("summary", {}, "Models"), form);
  const node = make("section.card.chooser", {"aria-label": "Models"}, details, make("div.opening", {}, state, seconds), notes);
  return {node, details, form, selects: selects.map((each) => each.select), reward, onCpu, close, state, seconds, notes, empty};
}

function fillSelect(select, none, models, chosen) {
  const before = chosen ?? select.value;
  const options = models.map((each) => {
    const option = new Option(described(each), each.id);
    option.disabled = each.why !== null;
    return option;
  });
  select.replaceChildren(...(none === null ? [] : [new Option(none, "")]), ...options);
  const usable = options.filter((option) => !option.disabled);
  if (usable.some((option) => option.value === before)) select.value = before;
  else select.value = none === null ? usable[0]?.value ?? "" : "";
}

function described(each) {
  if (each.why !== null) return `${each.id} (${each.status}: ${each.why})`;
  return each.step === null ? each.id : `${each.id} (${each.status}, step ${each.step})`;
}

// The third model is asked for when there is a second.
function showMore(view) {
  const third = view.selects[2];
  if (!third) return;
  third.parentNode.hidden = !view.selects[1].value;
  if (third.parentNode.hidden) third.value = "";
}

// A run's steps again, scored by another reward; or a new run that goes on from one of them with other settings.

import {all, button, fold, make, put} from "./dom.js";
import {address} from "./format.js";
import {makeJob} from "./jobs.js";
import {get, on, paced, postConfirmed} from "./server.js";

export function makeReplay(run) {
  const fault = make("p.fault", {role: "alert"}), place = make("div");
  let job = null;
  const field = (id, text, properties) => {
    const input = make("input", {id, autocomplete: "off", spellcheck: "false", ...properties});
    return [input, make("label", {for: id}, `${text} `), input];
  };
  const [reward, ...rewardNodes] = field("replay-reward", "Reward", {placeholder: "rewards.py:true_aim"});
  const [step, ...stepNodes] = field("replay-step", "Step", {type: "number", min: "1"});
  const [settings, ...settingNodes] = field("replay-settings", "Settings", {placeholder: "ppo.kl_coef 0.1", size: "40"});
  const send = async (body, then) => {
    put(fault, "");
    try {
      then(await postConfirmed("jobs", {kind: "replay", run, ...body}));
    } catch (error) {
      put(fault, error.message);
    }
  };
  const look = paced(async () => {
    const rows = (await get("jobs")).jobs.filter(({kind, run: of}) => kind === "replay" && of === run);
    if (!rows.length) return;
    if (job?.id !== rows[0].id) {
      job?.shown.end();
      job = {id: rows[0].id, shown: makeJob(rows[0].id, "What it says")};
      const {state, stop, error, output} = job.shown;
      place.replaceChildren(make("p.line", {}, state, stop), error, output);
    }
    job.shown.update(rows[0]);
  }, {wait: 1000, fail: (error) => put(fault, error.message)});
  const node = fold("Replay, or go on from a step",
    make("p.quiet", {}, "The steps are taken again, to the bit on a CPU, which takes as long as the training did, and every "
      + "response is scored by this function: both curves, and the step at which hacking began. The run stays as it is."),
    make("div.line", {}, ...rewardNodes, button("Replay with another reward", () => send(
      {reward: reward.value.trim()}, look))), place,
    make("p.quiet", {}, "Or a new run with this one's weights after a step, and other settings from there on."),
    make("div.line", {}, ...stepNodes, ...settingNodes, button("Go on from this step", () => send(
      {step: Number(step.value), settings: settings.value.trim()},
      (row) => location.hash = `#/run/${address(row.run)}`))), fault);
  look();
  return {node, end: all(on("jobs open", look), look.end, () => job?.shown.end())};
}

// How a run went, in sentences: the few metrics that say most, at its start and now.

import {make} from "./dom.js";
import {number} from "./format.js";
import {get} from "./server.js";

const POINTS = 10; // start and end are means of a tenth of the run each
const percent = (value) => `${Math.round(100 * value)}%`;
const fromTo = ({first, last}) => `${number(first)} at the start, ${number(last)} now`;
const right = ({first, last}) =>
  `Pairs told apart: ${percent(first)} at the start, ${percent(last)} now; by chance 50%.`;
const WORDS = { // metric -> its sentence, from {first, last, moved}
  reward: (at) => `Reward: ${fromTo(at)}: ${at.moved("it rose, which training is for", "it fell", "about the same")}.`,
  accuracy: right,
  "rewards/accuracies": right,
  loss: (at) => `Loss: ${fromTo(at)}: ${at.moved("the data's answers surprise the model more",
    "the data's answers surprise the model less", "about the same")}.`,
  "eval/loss": ({last}) => `On rows that it did not train on the loss is ${number(last)}.`,
  "eval/reward": ({last}) => `On prompts that it did not train on the reward is ${number(last)}.`,
  kl: ({last}) => `KL: ${number(Math.max(0, last))} nats per answer from the model that it began as: it has `
    + `${distance(last)}.`,
};

function distance(kl) {
  if (kl < 0.05) return "hardly moved";
  if (kl < 1) return "moved a little";
  return kl < 5 ? "moved clearly" : "moved far; read its answers, a reward may be fooled";
}

// The sentences for a run with these metrics [{name}], as nodes; with a reward none for the loss. own: what
// reward.own_samples measured.
export async function inWords(id, {metrics, own_samples: own}) {
  const agreed = own?.agreement == null ? [] : [make("li", {}, `Two models of half the data each agreed in `
    + `${percent(own.agreement)} of ${own.pairs} pairs of the starting model's own answers; by chance 50%.`)];
  const names = Object.keys(WORDS).filter((name) => metrics.some((metric) => metric.name === name));
  const hasReward = names.includes("reward");
  const told = names.filter((name) => !(hasReward && name.endsWith("loss")));
  if (!told.length) return agreed;
  const {series} = await get("history", {id, names: told.join(","), points: POINTS});
  return [...told.flatMap((name) => {
    const values = (series[name]?.mean ?? []).filter(Number.isFinite);
    if (values.length < 2 && !name.startsWith("eval/") || !values.length) return [];
    const [first, last] = [values[0], values.at(-1)], range = Math.max(...values) - Math.min(...values);
    const moved = (up, down, same) => Math.abs(last - first) < 0.1 * range || !range ? same : last > first ? up : down;
    return [make("li", {}, WORDS[name]({first, last, moved}))];
  }), ...agreed];
}

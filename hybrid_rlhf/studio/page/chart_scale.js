// The arithmetic of a chart: ranges, ticks, and values as the text of SVG paths. Nothing here touches the page.
// A series is {steps, low, high, mean}, lists of one length; null stands for what is not a number.

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// [lowest, highest] step and value of several series; null where there is not a single value.
export function extent(all) {
  let first = Infinity, last = -Infinity, low = Infinity, high = -Infinity;
  for (const {steps, low: lows, high: highs, mean} of all) {
    for (let i = 0; i < steps.length; i++) {
      first = Math.min(first, steps[i]);
      last = Math.max(last, steps[i]);
      for (const value of [lows[i], highs[i], mean[i]]) {
        if (!isNumber(value)) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
  }
  return low > high ? null : {first, last, low, high};
}

// Round values that cover low to high: at most about `most`, at distances of 1, 2 or 5 times a power of ten.
export function ticks(low, high, most) {
  if (low === high) {
    const room = Math.abs(low) * 0.1 || 1;
    return ticks(low - room, high + room, most);
  }
  const rough = (high - low) / Math.max(most - 1, 1), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((times) => power * times >= rough * 0.999999);
  const begin = Math.floor(low / step + 1e-9), end = Math.ceil(high / step - 1e-9);
  return {step, values: Array.from({length: end - begin + 1}, (_, i) => (begin + i) * step)};
}

// Round steps within first to last, whole numbers.
export function stepTicks(first, last, most) {
  if (first === last) return [first];
  const {step} = ticks(first, last, most), distance = Math.max(1, Math.round(step));
  const begin = Math.ceil(first / distance);
  return Array.from({length: Math.floor(last / distance) - begin + 1}, (_, i) => (begin + i) * distance);
}

// A tick's value with as many decimals as its distance to the next one needs.
export function tickText(value, step) {
  const size = Math.max(Math.abs(value), step);
  if (value === 0) return "0";
  if (size >= 1e6 || step < 1e-4) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  return value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
}

export const stepText = (step) => step >= 10000 && step % 100 === 0 ? `${step / 1000}k` : String(step);

// The mean as a line; it breaks where there is no number, and a value between two breaks is a dot.
export function linePath({steps, mean}, x, y) {
  let path = "", isOpen = false;
  for (let i = 0; i < steps.length; i++) {
    if (!isNumber(mean[i])) {
      isOpen = false;
      continue;
    }
    const here = `${x(steps[i]).toFixed(1)} ${y(mean[i]).toFixed(1)}`;
    path += isOpen ? `L${here}` : `M${here}h0`;
    isOpen = true;
  }
  return path;
}

// A dot at every value.
export function dotsPath({steps, mean}, x, y) {
  return steps.map((step, i) => isNumber(mean[i]) ? `M${x(step).toFixed(1)} ${y(mean[i]).toFixed(1)}h0` : "").join("");
}

// The area from low to high; empty where the two are equal throughout.
export function bandPath({steps, low, high}, x, y) {
  if (low.every((value, i) => value === high[i])) return "";
  let path = "", begin = 0;
  for (let i = 0; i <= steps.length; i++) {
    if (i < steps.length && isNumber(low[i]) && isNumber(high[i])) continue;
    if (i - begin > 1) path += areaPath(steps, low, high, begin, i, x, y);
    begin = i + 1;
  }
  return path;
}

function areaPath(steps, low, high, begin, end, x, y) {
  let there = "", back = "";
  for (let i = begin; i < end; i++) {
    const across = x(steps[i]).toFixed(1);
    there += `${i === begin ? "M" : "L"}${across} ${y(high[i]).toFixed(1)}`;
    back = `L${across} ${y(low[i]).toFixed(1)}${back}`;
  }
  return `${there}${back}Z`;
}

// The place of the step nearest to `step` in an ascending list; -1 in an empty one.
export function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : steps.length ? low : -1;
}

// All steps of several series, ascending, each once.
export function allSteps(all) {
  if (all.length === 1) return all[0].steps;
  return [...new Set(all.flatMap((series) => series.steps))].sort((a, b) => a - b);
}

// Where the series has a value for `step`: at most as far away as its own steps lie apart there; -1 for nowhere.
export function placeAt({steps}, step) {
  const place = nearest(steps, step);
  if (place < 0) return -1;
  const here = steps[place], before = steps[place - 1] ?? here, after = steps[place + 1] ?? here;
  return Math.abs(here - step) <= Math.max(1, here - before, after - here) ? place : -1;
}

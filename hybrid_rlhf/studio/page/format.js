// Numbers, times and sizes as people read them; the same words as the terminal and the reports.

const MINUTE = 60, HOUR = 3600, DAY = 86400;
const MIB = 2 ** 20, GIB = 2 ** 30;

// Four significant digits; integers in full. "not a number" for what is none.
export function number(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "not a number";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return String(value);
  const size = Math.abs(value);
  if (size >= 1e-4 && size < 1e6) return String(Number(value.toPrecision(4)));
  return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
}

// 7 s, 1:05, 2:00:09, 2 d 3 h; "?" where it is not known.
export function duration(seconds) {
  if (!Number.isFinite(seconds) || seconds < 0) return "?";
  if (seconds < 9.95) return `${Number(seconds.toPrecision(seconds < 0.1 ? 1 : 2))} s`;
  const whole = Math.round(seconds);
  if (whole < MINUTE) return `${whole} s`;
  if (whole >= 2 * DAY) return `${Math.floor(whole / DAY)} d ${Math.floor(whole % DAY / HOUR)} h`;
  const two = (value) => String(value).padStart(2, "0");
  const minutes = Math.floor(whole % HOUR / MINUTE);
  if (whole < HOUR) return `${minutes}:${two(whole % MINUTE)}`;
  return `${Math.floor(whole / HOUR)}:${two(minutes)}:${two(whole % MINUTE)}`;
}

export function bytes(size) {
  if (!Number.isFinite(size)) return "?";
  if (size >= GIB) return `${(size / GIB).toFixed(1)} GiB`;
  if (size >= 10 * MIB) return `${Math.round(size / MIB)} MiB`;
  return size >= 0.1 * MIB ? `${(size / MIB).toFixed(1)} MiB` : `${Math.ceil(size / 1024)} KiB`;
}

// "5 min ago" of a time in ISO 8601; the day for what is older than a month.
export function age(time, now = Date.now()) {
  const seconds = (now - Date.parse(time)) / 1000;
  if (!Number.isFinite(seconds)) return "";
  if (seconds < MINUTE) return "just now";
  if (seconds < HOUR) return `${Math.floor(seconds / MINUTE)} min ago`;
  if (seconds < DAY) return `${Math.floor(seconds / HOUR)} h ago`;
  if (seconds < 31 * DAY) return count(Math.floor(seconds / DAY), "day") + " ago";
  return new Date(time).toISOString().slice(0, 10);
}

// A time in ISO 8601 by this machine's clock, to the second.
export function moment(time) {
  const date = new Date(time);
  return Number.isNaN(date.getTime()) ? "" : date.toLocaleString();
}

export const count = (many, word) => `${many.toLocaleString("en")} ${word}${many === 1 ? "" : "s"}`;

// Whether this is a telephone's window: there a run's long sections are folded.
export const isNarrow = () => matchMedia("(max-width: 46rem)").matches;

// The unit that a metric's values are shown in: bytes as MiB or GiB, all else as it is.
export function unitOf(name, highest) {
  const plain = name.replace(/^eval\//, "");
  if (!/^(memory\/|engine\/(kv|kept)_bytes$)/.test(plain)) return {factor: 1, word: ""};
  return highest >= GIB ? {factor: GIB, word: "GiB"} : {factor: MIB, word: "MiB"};
}

// A metric's value in its own unit.
export function shown(name, value) {
  const unit = unitOf(name, Math.abs(value));
  return unit.word ? `${number(value / unit.factor)} ${unit.word}` : number(value);
}

const HEADLINES = {"mark/held": "other marks held", "mark/kl": "KL per token"}; // names that say little alone

// What says most of a run: "reward 0.71, held out 0.69, kl 2.1".
export function headline(row) {
  return (row.headline ?? []).map(({name, value}, i, all) => {
    const isSame = i > 0 && name === `eval/${all[i - 1].name}`;
    const text = `${isSame ? "held out" : HEADLINES[name] ?? name} ${shown(name, value)}`;
    return text.replaceAll(" ", "\u00a0"); // a line ends between two
  }).join(", ");
}

// The parts of a long name, between which a line may end.
export function breakable(text) {
  return text.split(/(?<=[/_])/).flatMap((part, i) => i ? [document.createElement("wbr"), part] : [part]);
}

// The first of NAME, NAME-2, NAME-3 that is not taken.
export function freeName(stem, isTaken) {
  let name = stem;
  for (let n = 2; isTaken(name); n++) name = `${stem}-${n}`;
  return name;
}

// A run's id in an address: #/run/ + address("demo/ppo").
export const address = (id) => id.split("/").map(encodeURIComponent).join("/");

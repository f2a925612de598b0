// Amounts as people read them.

// 1610612736 -> "1.5 GiB"
export function size(bytes) {
  if (bytes === null || bytes === undefined) return "unknown";
  let value = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024 || unit === "GiB") return `${digits(value, unit === "B" ? 0 : 1)} ${unit}`;
    value /= 1024;
  }
  return "";
}

// 5400 -> "1 h 30 min"
export function duration(seconds) {
  if (seconds < 1) return `${digits(1000 * seconds, seconds < 0.01 ? 2 : 0)} ms`;
  if (seconds < 90) return `${digits(seconds, seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${digits(minutes / 1440, 1)} days`;
}

const digits = (value, places) => value.toLocaleString("en", {maximumFractionDigits: places});

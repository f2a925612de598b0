// Not built yet.

export function show(root) {
  root.textContent = "";
}

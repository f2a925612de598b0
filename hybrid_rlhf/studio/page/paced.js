// Work that news ask for: not more often than the eye needs, and only while somebody can see what it changes.

// Returns ask(): has work() called, at most once in `wait` ms and never twice at once. While the tab is hidden, or
// `node` is not on the screen, it waits; what was asked meanwhile is one call then. ask.end() ends it. A fault goes to
// `fail`.
export function paced(work, {wait = 500, node = null, fail = () => {}} = {}) {
  let isAsked = false, isBusy = false, isSeen = node === null, hasEnded = false;
  let last = -Infinity, timer = 0;

  async function go() {
    clearTimeout(timer);
    if (!isAsked || isBusy || !isSeen || document.hidden || hasEnded) return;
    const left = last + wait - performance.now();
    if (left > 0) {
      timer = setTimeout(go, left);
      return;
    }
    isAsked = false;
    isBusy = true;
    try {
      await work();
    } catch (fault) {
      if (!hasEnded) fail(fault);
    }
    isBusy = false;
    last = performance.now();
    go();
  }

  const endSeeing = node === null ? () => {} : seen(node, (now) => {
    isSeen = now;
    go();
  });
  document.addEventListener("visibilitychange", go);
  const ask = () => {
    isAsked = true;
    go();
  };
  ask.end = () => {
    hasEnded = true;
    clearTimeout(timer);
    endSeeing();
    document.removeEventListener("visibilitychange", go);
  };
  return ask;
}

const eyes = new Map(); // node -> function of whether it is on the screen, or nearly
let observer = null;

// Tell `handle` whether `node` is on the screen, now and whenever that changes; returns what ends it.
export function seen(node, handle) {
  observer ??= new IntersectionObserver((entries) => {
    for (const entry of entries) eyes.get(entry.target)?.(entry.isIntersecting);
  }, {rootMargin: "120px"});
  eyes.set(node, handle);
  observer.observe(node);
  return () => {
    observer.unobserve(node);
    eyes.delete(node);
  };
}

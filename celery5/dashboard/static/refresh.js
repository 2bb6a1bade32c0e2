// Show a page anew while somebody looks at it: fetch its content again, and change only what is different.
//
// There is no stream of events: a request each few seconds heals by itself, ends with the tab, and is answered for all
// tabs from one look at Redis. A hidden tab makes none.
const SLOWEST = 30;

export function keepFresh(main, onChange) {
  const interval = Number(main.dataset.refresh || 0);
  if (!interval) return;
  const status = document.getElementById("live");
  let failures = 0;
  let shownAt = Date.now();
  let timer = 0;

  async function refresh() {
    timer = 0;
    if (document.hidden) return;
    const wait = new AbortController();
    const limit = setTimeout(() => wait.abort(), 10_000);
    try {
      const answer = await fetch(location.href, {
        headers: { "X-Part": "main" },
        signal: wait.signal,
        redirect: "manual",
      });
      if (answer.type === "opaqueredirect") return location.reload(); // the session is over
      const next = document.createElement("main");
      next.innerHTML = await answer.text();
      // While the broker is unreachable what was shown last stays, and its age is said.
      if (answer.ok || answer.status === 404 || main.querySelector(".problem[data-status]")) {
        merge(main, next);
        onChange();
      }
      failures = answer.ok ? 0 : failures + 1;
      if (answer.ok) shownAt = Date.now();
      say(answer.ok ? "" : answer.status === 503 ? `broker unreachable; shown as of ${clock(shownAt)}` : `error ${answer.status}`);
    } catch {
      failures += 1;
      say(`the dashboard does not answer; shown as of ${clock(shownAt)}`);
    } finally {
      clearTimeout(limit);
      schedule();
    }
  }

  function say(text) {
    if (status && status.textContent !== text) status.textContent = text;
    document.body.classList.toggle("stale", text !== "");
  }

  function schedule() {
    if (timer || document.hidden) return;
    timer = setTimeout(refresh, 1000 * Math.min(interval * (1 + failures), SLOWEST));
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && !timer) refresh();
  });
  schedule();
}

// Change `old` so that it equals `next`, and keep what is equal: the focus, what is selected, what is typed or open.
export function merge(old, next) {
  const olds = [...old.childNodes];
  const nexts = [...next.childNodes];
  nexts.forEach((wanted, index) => {
    const present = olds[index];
    if (present === undefined) old.append(wanted);
    else if (present.isEqualNode(wanted)) return;
    else if (isSameElement(present, wanted)) mergeElement(present, wanted);
    else if (present.nodeType === Node.TEXT_NODE && wanted.nodeType === Node.TEXT_NODE) present.data = wanted.data;
    else present.replaceWith(wanted);
  });
  olds.slice(nexts.length).forEach((node) => node.remove());
}

function clock(ms) {
  return `${new Date(ms).toISOString().slice(11, 19)} UTC`;
}

function isSameElement(one, other) {
  return one.nodeType === Node.ELEMENT_NODE && one.nodeName === other.nodeName && one.id === other.id;
}

function mergeElement(present, wanted) {
  for (const { name } of [...present.attributes]) {
    const isOwn = name === "open" || name.startsWith("data-own-");
    if (!wanted.hasAttribute(name) && !isOwn) present.removeAttribute(name);
  }
  for (const { name, value } of [...wanted.attributes]) {
    if (present.getAttribute(name) !== value) present.setAttribute(name, value);
  }
  if (present.matches("input, textarea, select")) return; // what is typed stays
  if (present.matches("figure.chart")) {
    present.querySelector("details, p.empty")?.replaceWith(keepOpen(present, wanted));
    return; // the chart is drawn from the attributes
  }
  merge(present, wanted);
}

function keepOpen(present, wanted) {
  const details = wanted.querySelector("details, p.empty");
  if (present.querySelector("details")?.open) details.open = true;
  return details;
}

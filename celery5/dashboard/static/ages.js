// Keep the ages on a page going: what said "3 s ago" when it was read must not say so a minute later.
const PAUSE = 1000;

export function keepAges(main) {
  const ahead = Number(main.dataset.at || 0) * 1000 - Date.now(); // the clock of this machine may be wrong
  const update = () => {
    for (const time of main.querySelectorAll("time[data-age]")) {
      const text = formatAge(Date.parse(time.dateTime) / 1000, (Date.now() + ahead) / 1000);
      if (time.textContent !== text) time.textContent = text;
    }
  };
  setInterval(update, PAUSE);
  return update;
}

// The same as `format_age` of Python, which a test compares.
export function formatAge(moment, now) {
  const seconds = Math.trunc(Math.abs(now - moment));
  if (!seconds) return "just now";
  return moment <= now ? `${formatDuration(seconds)} ago` : `in ${formatDuration(seconds)}`;
}

function formatDuration(seconds) {
  if (seconds < 60) return `${seconds} s`;
  const minutes = roundHalfEven(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function roundHalfEven(value) {
  const below = Math.floor(value);
  return value - below === 0.5 ? below + (below % 2) : Math.round(value);
}

// A box in JavaScript, with nothing but Node's standard library.
const lines = require("readline").createInterface({ input: process.stdin });
const say = (frame) => process.stdout.write(JSON.stringify(frame) + "\n");

function slug({ title, longest }) {
  if (!title.trim()) throw new RangeError("a title has at least one letter");
  return title.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, longest).replace(/^-|-$/g, "");
}

lines.on("line", (line) => {
  const told = JSON.parse(line);
  if (told.type === "hello") {
    say({ type: "ready", version: 1 });
  } else if (told.type === "run") {
    try {
      say({ type: "result", id: told.id, value: slug(told.arguments) });
    } catch (error) {
      const failure = { type: error.name, message: error.message, traceback: error.stack };
      say({ type: "error", id: told.id, failure });
    }
  }
});
lines.on("close", () => process.exit(0)); // the worker needs this box no more

// Select all rows of a table at once: a checkbox in its head.
export function startBulkSelection(root) {
  root.addEventListener("change", (event) => {
    const box = event.target;
    if (!(box instanceof HTMLInputElement) || !box.matches("[data-select-all]")) return;
    const rows = box.closest("table").querySelectorAll("tbody input[type=checkbox]");
    for (const row of rows) row.checked = box.checked;
  });
}

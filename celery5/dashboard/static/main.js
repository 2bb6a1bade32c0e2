// Start what scripts add to the pages. Without it each page can be read and used as well.
import { keepAges } from "./ages.js";
import { drawCharts } from "./charts.js";
import { keepFresh } from "./refresh.js";
import { startBulkSelection } from "./selection.js";

const main = document.getElementById("main");
drawCharts(main);
startBulkSelection(document);
const updateAges = keepAges(main);
keepFresh(main, () => {
  drawCharts(main);
  updateAges();
});

// Start what scripts add to the pages. Without it each page can be read and used as well.
import { drawCharts } from "./charts.js";
import { keepFresh } from "./refresh.js";
import { startBulkSelection } from "./selection.js";

const main = document.getElementById("main");
drawCharts(main);
startBulkSelection(document);
keepFresh(main, () => drawCharts(main));

// node sentences.mjs PAGE: what the page's scripts say of every step and node, as JSON lines, without a browser.
import { readFileSync } from "node:fs";

const html = readFileSync(process.argv[2], "utf8"), blocks = new Map();
for (const [, id, text] of html.matchAll(/<script type="[^"]*" id="([^"]*)">([^<]*)<\/script>/g)) blocks.set(id, { textContent: text });
globalThis.document = { readyState: "complete", getElementById: (id) => blocks.get(id) ?? null };

const { RUNS } = await import("../../specscope/page/source/data.js");
const { Place, aboutLikeliest, brief, nodeRows, typical, why, whyStep } = await import("../../specscope/page/source/place.js");

for (const run of RUNS) {
  await run.open();
  for (let place = 0; place < run.steps; place++) {
    const step = await run.step(place), nodes = [];
    for (let number = 0; step.judged && number <= step.size; number++) {
      const at = Place.at(step, number), numbers = Object.entries(at.numbers);
      nodes.push([why(step, number), brief(step, number), nodeRows(step, number), aboutLikeliest(at), numbers, typical(step, number)]);
    }
    console.log(JSON.stringify([step.name, whyStep(step), nodes]));
  }
}

// Ask the search of the built site, as its pages do: the worker of mkdocs-material, with its lunr, and our index.
// Reads {"site": folder, "queries": [...]} from stdin, and prints for each query the addresses that it finds, in order.
const fs = require("fs")
const path = require("path")
const vm = require("vm")

const { site, queries } = JSON.parse(fs.readFileSync(0, "utf8"))
const folder = path.join(site, "assets/javascripts/workers")
const file = fs.readdirSync(folder).find((name) => /^search\..*\.js$/.test(name))
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"))

const [SETUP, READY, QUERY, RESULT] = [0, 1, 2, 3]
let listen
const heard = []
const worker = { URL, console, location: new URL("https://docs.example/") }
worker.self = worker // as in a browser: what is assigned to it is global
worker.addEventListener = (_type, listener) => { listen = listener }
worker.postMessage = (message) => heard.push(message)
vm.runInNewContext(fs.readFileSync(path.join(folder, file), "utf8"), worker)

const ask = async (type, data) => {
  heard.length = 0
  await listen({ data: { type, data } })
  for (let waited = 0; !heard.length && waited < 1000; waited++) await new Promise((go) => setTimeout(go, 10))
  return heard[0]
}

;(async () => {
  await ask(SETUP, { config: index.config, docs: index.docs, options: { suggest: false } })
  const found = {}
  for (const query of queries) {
    const reply = await ask(QUERY, query)
    const items = reply.type === RESULT ? reply.data.items : []
    found[query] = items.map((page) => page.slice().sort((a, b) => b.score - a.score)[0].location)
  }
  console.log(JSON.stringify(found))
})()

// Builds the page: node build.mjs [FOLDER]. Writes index.html, page.js, page.css and digests.json, by which a test knows
// that they are of these sources.
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? join(here, "../src/foreword/serve/static");

async function bundle(entry) {
  const options = { bundle: true, minify: true, format: "esm", target: "es2022", charset: "utf8", write: false };
  const result = await build({ ...options, entryPoints: [join(here, "src", entry)], legalComments: "none" });
  return result.outputFiles[0].text;
}

const built = {
  "index.html": readFileSync(join(here, "src/index.html"), "utf8"),
  "page.css": await bundle("page.css"),
  "page.js": await bundle("page.ts"),
};

const digest = (text) => createHash("sha256").update(text).digest("hex");
const own = ["build.mjs", "package-lock.json", "package.json", "tsconfig.json"];
const names = [...own, ...readdirSync(join(here, "src")).map((name) => `src/${name}`)].sort();
const sources = Object.fromEntries(names.map((name) => [name, digest(readFileSync(join(here, name), "utf8"))]));
const digests = { sources, built: Object.fromEntries(Object.entries(built).map(([name, text]) => [name, digest(text)])) };

mkdirSync(out, { recursive: true });
for (const [name, text] of Object.entries(built)) writeFileSync(join(out, name), text);
writeFileSync(join(out, "digests.json"), `${JSON.stringify(digests, null, 2)}\n`);

import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { gzipSync } from "node:zlib";
import react from "@vitejs/plugin-react";
import { defineConfig, type Plugin } from "vite";

const TEXTS = /\.(?:js|css|html|svg)$/;

/** Beside each text of the build the same compressed: the gateway sends the one that is asked for. */
function compressed(): Plugin {
  return {
    name: "compressed",
    apply: "build",
    writeBundle({ dir }) {
      for (const entry of readdirSync(dir!, { recursive: true, withFileTypes: true })) {
        const path = join(entry.parentPath, entry.name);
        if (entry.isFile() && TEXTS.test(entry.name)) writeFileSync(`${path}.gz`, gzipSync(readFileSync(path), { level: 9 }));
      }
    },
  };
}

export default defineConfig({
  // the page works below any path
  base: "./",
  plugins: [react(), compressed()],
  build: {
    target: "es2022",
    assetsDir: "console",
    // a file that is written into another one would be a data: address, which the policy forbids
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
  },
});

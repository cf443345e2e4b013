// Knowledge as a picture: who and what, and how they are connected.

import { useMemo, useState } from "react";
import type { Shapes } from "./asking";
import { placed } from "./layout";
import { counted } from "../words";

const RADIUS = 12;
// A few names are not drawn larger than so many times what they are among many.
const LARGEST = 1.4;
const shortened = (name: string): string => (name.length > 24 ? `${name.slice(0, 23)}…` : name);

export default function Picture({ graph, onAbout }: { graph: Shapes["KnowledgeGraph"]; onAbout(name: string): void }) {
  const { spots, lines, frame } = useMemo(() => placed(graph), [graph]);
  const [near, setNear] = useState<string | null>(null);
  const linked = new Set(near === null ? [] : lines.filter(({ from, to }) => from.id === near || to.id === near).flatMap(({ from, to }) => [from.id, to.id]));
  const aside = (...ids: string[]) => (near !== null && !ids.every((id) => id === near || linked.has(id)) ? " aside" : "");
  const chosen = (name: string, id: string) => onAbout(id === "@user" ? "me" : name);
  return (
    <figure className="picture">
      <svg viewBox={frame.join(" ")} role="group" aria-label={`${counted(spots.length, "name")} and ${counted(lines.length, "fact")}`} style={{ maxHeight: `min(60vh, ${frame[3] * LARGEST}px)` }}>
        {lines.map(({ id, from, to, relation, state }) => {
          const along = Math.atan2(to.y - from.y, to.x - from.x);
          const end = { x: to.x - RADIUS * Math.cos(along), y: to.y - RADIUS * Math.sin(along) };
          return (
            <g key={id} className={`edge ${state}${near !== null && from.id !== near && to.id !== near ? " aside" : ""}`}>
              <line x1={from.x} y1={from.y} x2={end.x} y2={end.y} />
              <path className="arrow" d="M-8 -4 0 0 -8 4z" transform={`translate(${end.x} ${end.y}) rotate(${(along * 180) / Math.PI})`} />
              <text x={(from.x + to.x) / 2} y={(from.y + to.y) / 2 - 4}>{relation}</text>
            </g>
          );
        })}
        {spots.map(({ id, name, kind, x, y }) => (
          <g key={id} className={`node ${kind}${aside(id)}`} transform={`translate(${x} ${y})`} role="button" tabIndex={0} aria-label={`${shortened(name)}: show only what is about it`}
            onClick={() => chosen(name, id)} onKeyDown={(event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); chosen(name, id); } }}
            onMouseEnter={() => setNear(id)} onMouseLeave={() => setNear(null)} onFocus={() => setNear(id)} onBlur={() => setNear(null)}>
            <circle r={RADIUS} /><text y="28">{shortened(name)}</text>
          </g>
        ))}
      </svg>
      <figcaption className="dim">What was so and is not any more is dashed. A name shows only what is about it.</figcaption>
    </figure>
  );
}

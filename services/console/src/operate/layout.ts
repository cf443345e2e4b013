// Where the nodes of a graph stand: a force layout, the same for the same graph.

import { forceCollide, forceLink, forceManyBody, forceSimulation, forceX, forceY, type SimulationLinkDatum, type SimulationNodeDatum } from "d3-force";
import type { Shapes } from "./asking";

export interface Spot extends SimulationNodeDatum {
  id: string;
  name: string;
  kind: string;
  x: number;
  y: number;
}

export interface Line {
  id: string;
  from: Spot;
  to: Spot;
  relation: string;
  state: string;
}

export interface Placed {
  spots: Spot[];
  lines: Line[];
  /** The smallest rectangle around all of it: left, top, width, height. */
  frame: [number, number, number, number];
}

const STEPS = 300;
const RING = 130;
const ROOM = { x: 80, y: 40 };

export function placed(graph: Shapes["KnowledgeGraph"]): Placed {
  const first = beginnings(graph);
  const spots: Spot[] = graph.nodes.map((node) => ({ ...node, ...first.get(node.id)! }));
  const byId = new Map(spots.map((spot) => [spot.id, spot]));
  const lines = graph.edges.flatMap((edge): Line[] => {
    const from = byId.get(edge.from);
    const to = byId.get(edge.to);
    return from && to ? [{ id: edge.id, from, to, relation: edge.relation, state: edge.state }] : [];
  });
  const links: SimulationLinkDatum<Spot>[] = lines.map(({ from, to }) => ({ source: from, target: to }));
  forceSimulation(spots)
    .force("link", forceLink<Spot, SimulationLinkDatum<Spot>>(links).distance(170))
    .force("charge", forceManyBody().strength(-600))
    .force("collide", forceCollide(56))
    .force("x", forceX(0).strength(0.03))
    .force("y", forceY(0).strength(0.09))
    .stop().tick(STEPS);
  const xs = spots.map((spot) => spot.x);
  const ys = spots.map((spot) => spot.y);
  const left = Math.min(0, ...xs) - ROOM.x;
  const top = Math.min(0, ...ys) - ROOM.y;
  return { spots, lines, frame: [left, top, Math.max(0, ...xs) + ROOM.x - left, Math.max(0, ...ys) + ROOM.y - top] };
}

/** Where the layout begins: each name in the sector of the one that leads to it, so that few lines cross. */
function beginnings(graph: Shapes["KnowledgeGraph"]): Map<string, { x: number; y: number }> {
  const near = new Map<string, string[]>(graph.nodes.map(({ id }) => [id, []]));
  for (const { from, to } of graph.edges) {
    if (near.has(from) && near.has(to) && from !== to) { near.get(from)!.push(to); near.get(to)!.push(from); }
  }
  const found = new Map<string, { x: number; y: number }>();
  const spread = (ids: string[], from: number, to: number, ring: number) => {
    const width = (to - from) / Math.max(1, ids.length);
    const next = ids.map((id, at) => {
      const angle = from + width * (at + 0.5);
      found.set(id, { x: RING * ring * Math.cos(angle), y: RING * ring * Math.sin(angle) });
      return { id, from: from + width * at };
    });
    // what two of them lead to is the first one's
    for (const one of next) {
      const own = [...new Set(near.get(one.id))].filter((id) => !found.has(id));
      if (own.length) spread(own, one.from, one.from + width, ring + 1);
    }
  };
  // names that nothing leads to stand around the best known one
  for (const { id } of [...graph.nodes].sort((a, b) => near.get(b.id)!.length - near.get(a.id)!.length)) {
    if (found.has(id)) continue;
    const turned = found.size * 2.4;
    spread([id], turned, turned + 2 * Math.PI, found.size ? Math.sqrt(found.size) + 1 : 0);
  }
  return found;
}

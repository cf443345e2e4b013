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
const ROOM = { x: 80, y: 40 };

export function placed(graph: Shapes["KnowledgeGraph"]): Placed {
  // the layout begins at the same spots each time, so that a picture does not jump when a fact is added
  const spots: Spot[] = graph.nodes.map((node, at) => ({ ...node, x: 40 * Math.sqrt(at + 0.5) * Math.cos(at * 2.4), y: 40 * Math.sqrt(at + 0.5) * Math.sin(at * 2.4) }));
  const byId = new Map(spots.map((spot) => [spot.id, spot]));
  const lines = graph.edges.flatMap((edge): Line[] => {
    const from = byId.get(edge.from);
    const to = byId.get(edge.to);
    return from && to ? [{ id: edge.id, from, to, relation: edge.relation, state: edge.state }] : [];
  });
  const links: SimulationLinkDatum<Spot>[] = lines.map(({ from, to }) => ({ source: from, target: to }));
  forceSimulation(spots)
    .force("link", forceLink<Spot, SimulationLinkDatum<Spot>>(links).distance(130))
    .force("charge", forceManyBody().strength(-320))
    .force("collide", forceCollide(34))
    .force("x", forceX(0).strength(0.04))
    .force("y", forceY(0).strength(0.08))
    .stop().tick(STEPS);
  const xs = spots.map((spot) => spot.x);
  const ys = spots.map((spot) => spot.y);
  const left = Math.min(0, ...xs) - ROOM.x;
  const top = Math.min(0, ...ys) - ROOM.y;
  return { spots, lines, frame: [left, top, Math.max(0, ...xs) + ROOM.x - left, Math.max(0, ...ys) + ROOM.y - top] };
}

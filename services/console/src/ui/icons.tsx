// Drawings, as paths: not every machine has a font with them.

const PATHS = {
  plus: "M12 5v14M5 12h14",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14zm5 12 4 4",
  menu: "M4 7h16M4 12h16M4 17h16",
  more: "M4 12a1 1 0 1 0 2 0 1 1 0 1 0-2 0m7 0a1 1 0 1 0 2 0 1 1 0 1 0-2 0m7 0a1 1 0 1 0 2 0 1 1 0 1 0-2 0",
  send: "M12 19V5m-6 6 6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v10H9zM5 15V5h10",
  edit: "M4 20h4L19 9l-4-4L4 16z",
  again: "M20 12a8 8 0 1 1-2.300-5.700M20 4v4h-4",
  up: "M7 11v9H4v-9zm0 0 4-8c2 0 3 1.500 2.500 3.500L13 9h5.500c1.500 0 2.300 1.300 2 2.600l-1.500 6.500c-.3 1.200-1.200 1.900-2.300 1.900H7",
  down: "M17 13V4h3v9zm0 0-4 8c-2 0-3-1.500-2.500-3.500L11 15H5.500c-1.500 0-2.300-1.300-2-2.600L5 5.900C5.300 4.700 6.200 4 7.300 4H17",
  star: "M12 3l2.700 5.900 6.300.7-4.700 4.300 1.300 6.300L12 17l-5.600 3.200 1.300-6.300L3 9.600l6.300-.7z",
  pin: "M9 4h6l-1 6 4 4H6l4-4zM12 14v6",
  trash: "M5 7h14M9 7V4h6v3M7 7l1 13h8l1-13",
  clip: "M8 12.500 14.500 6a3 3 0 0 1 4.200 4.200l-8.500 8.500a5 5 0 0 1-7-7L11 4",
  tune: "M4 8h10m4 0h2M4 16h4m4 0h8M16 6v4M10 14v4",
  memory: "M12 4c4 0 7 1.300 7 3s-3 3-7 3-7-1.300-7-3 3-3 7-3zM5 7v10c0 1.700 3 3 7 3s7-1.300 7-3V7M5 12c0 1.700 3 3 7 3s7-1.300 7-3",
  globe: "M12 4a8 8 0 1 0 0 16 8 8 0 0 0 0-16zM4 12h16M12 4c3 3 3 13 0 16M12 4c-3 3-3 13 0 16",
  page: "M6 3h8l4 4v14H6zM14 3v4h4M9 12h6M9 16h6",
  people: "M9 11a3 3 0 1 0 0-6 3 3 0 0 0 0 6zm-6 9c0-3.500 2.500-6 6-6s6 2.500 6 6M16 5.500a3 3 0 0 1 0 5.500M17.500 14.500c2 .8 3.500 2.800 3.500 5.500",
  tool: "M14 6a4 4 0 0 0-5 5l-6 6 4 4 6-6a4 4 0 0 0 5-5l-3 3-4-4z",
  graph: "M6 8a2 2 0 1 0 0-4 2 2 0 0 0 0 4zm12 12a2 2 0 1 0 0-4 2 2 0 0 0 0 4zm0-12a2 2 0 1 0 0-4 2 2 0 0 0 0 4zM8 6h8M7.500 7.500l9 9",
  arrow: "M12 5v14m-6-6 6 6 6-6",
  close: "M6 6l12 12M18 6 6 18",
  save: "M12 4v11m-5-5 5 5 5-5M5 20h14",
  messages: "M4 5h12v8H8l-4 3zM8 16v2h8l4 3V9h-2",
  key: "M15 4a5 5 0 1 0 0 10 5 5 0 0 0 0-10zm-4 9-7 7m3-3 3 3",
  check: "M5 12l5 5 9-10",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name, filled = false }: { name: IconName; filled?: boolean }) {
  return (
    <svg viewBox="0 0 24 24" className={filled ? "icon filled" : "icon"} aria-hidden="true" focusable="false">
      <path d={PATHS[name]} />
    </svg>
  );
}

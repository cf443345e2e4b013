import { memo, useLayoutEffect, useRef } from "react";
import { clean } from "../trusted";
import { Blocks, grouped, type Block } from "./blocks";
import { dress } from "./dress";

// From so many groups of blocks on, those out of sight are not laid out.
const LONG = 3;

interface ProseProps {
  text: string;
  /** Nothing will be added to the text. */
  over: boolean;
}

/** A text in Markdown. While it grows, its finished blocks are left alone: a selection in them survives. */
export const Prose = memo(function Prose({ text, over }: ProseProps) {
  const blocks = useRef<Blocks>(null);
  blocks.current ??= new Blocks();
  const groups = grouped(blocks.current.of(text, over));
  return (
    <div className={groups.length >= LONG ? "prose long" : "prose"} dir="auto">
      {groups.map((group, at) => <Group key={group[0]!.start} blocks={group} over={over || at < groups.length - 1} />)}
    </div>
  );
});

/** Blocks that are left out of sight together: the browser watches every place that it may leave out, in each frame. */
const Group = memo(
  function Group({ blocks, over }: { blocks: readonly Block[]; over: boolean }) {
    return <div className="group">{blocks.map((block, at) => <BlockView key={block.start} block={block} over={over || at < blocks.length - 1} />)}</div>;
  },
  (one, other) => one.over === other.over && one.blocks.length === other.blocks.length && one.blocks.every((block, at) => block === other.blocks[at]),
);

const BlockView = memo(
  function BlockView({ block, over }: { block: Block; over: boolean }) {
    const place = useRef<HTMLDivElement>(null);
    const before = useRef("");
    useLayoutEffect(() => {
      const element = place.current!;
      if (!grown(element, before.current, block, over)) element.replaceChildren(clean(block.html));
      before.current = block.text;
      dress(element, over);
    }, [block.html, block.text, over]);
    return <div className="block" ref={place} />;
  },
  (one, other) => one.block.html === other.block.html && one.over === other.over,
);

/** Adds to code that is being written instead of making it anew; false when it is something else. */
function grown(element: HTMLElement, before: string, block: Block, over: boolean): boolean {
  if (over || !before || !block.text.startsWith(before) || !/^ {0,3}```/.test(block.text)) return false;
  const code = element.querySelector("pre > code");
  const text = code?.firstChild;
  if (!code || !(text instanceof Text) || code.childNodes.length !== 1) return false;
  const content = block.text.slice(block.text.indexOf("\n") + 1);
  // a fence that is indented, or closed: the parser knows better
  if (/^ /.test(block.text) || /\n```\s*$/.test(block.text) || !content.startsWith(text.data)) return false;
  text.appendData(content.slice(text.data.length));
  return true;
}

import { memo, useLayoutEffect, useRef } from "react";
import { clean } from "../trusted";
import { Blocks, type Block } from "./blocks";
import { dress } from "./dress";

// From so many blocks on, those out of sight are not laid out.
const LONG = 40;

interface ProseProps {
  text: string;
  /** Nothing will be added to the text. */
  over: boolean;
}

/** A text in Markdown. While it grows, its finished blocks are left alone: a selection in them survives. */
export const Prose = memo(function Prose({ text, over }: ProseProps) {
  const blocks = useRef<Blocks>(null);
  blocks.current ??= new Blocks();
  const shown = blocks.current.of(text, over);
  return (
    <div className={shown.length > LONG ? "prose long" : "prose"} dir="auto">
      {shown.map((block, at) => <BlockView key={block.start} block={block} over={over || at < shown.length - 1} />)}
    </div>
  );
});

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

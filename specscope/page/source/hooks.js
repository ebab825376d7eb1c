// What components wait for.
import { useEffect, useState } from "preact/hooks";

/** What a promise gives; while another one is awaited, what the last one gave. */
export function useLoaded(load, keys) {
  const [found, set] = useState(undefined);
  useEffect(() => {
    let wanted = true;
    Promise.resolve(load()).then((value) => wanted && set(value));
    return () => {
      wanted = false;
    };
  }, keys);
  return found;
}

/** The size of an element, as it changes. */
export function useSize(reference) {
  const [size, set] = useState({ width: 0, height: 0 });
  useEffect(() => {
    const watcher = new ResizeObserver(([entry]) => set({ width: entry.contentRect.width, height: entry.contentRect.height }));
    watcher.observe(reference.current);
    return () => watcher.disconnect();
  }, []);
  return size;
}

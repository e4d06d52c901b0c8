// Colours of the theme for canvases, and canvases that fit the screen's pixels.
const dark = matchMedia("(prefers-color-scheme: dark)");
let cache = {};

/** The value of a CSS variable, such as blue. */
export function colour(name) {
  return (cache[name] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
}

/** Call `then` when the theme changes. */
export function onTheme(then) {
  dark.addEventListener("change", () => {
    cache = {};
    then();
  });
}

/** The context of a canvas of `height` CSS pixels, cleared, in CSS pixels; its width is that of its place. */
export function context(canvas, height) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const drawing = canvas.getContext("2d");
  drawing.setTransform(ratio, 0, 0, ratio, 0, 0);
  drawing.clearRect(0, 0, width, height);
  return { drawing, width };
}

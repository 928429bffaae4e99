// The contrast of a button's text with what is behind it, as WCAG 2 defines it.
(button) => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const behind = [];
  for (let one = button; one; one = one.parentElement) behind.unshift(getComputedStyle(one).backgroundColor);
  const light = (...colours) => {
    for (const colour of ["white", ...colours]) {
      context.fillStyle = colour;
      context.fillRect(0, 0, 1, 1);
    }
    const [red, green, blue] = [...context.getImageData(0, 0, 1, 1).data].map((part) => part / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const [low, high] = [light(...behind), light(...behind, getComputedStyle(button).color)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

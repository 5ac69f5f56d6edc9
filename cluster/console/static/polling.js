// What has no stream is asked for again and again, as long as the page is open.

import { get } from "./api.js";
import { h, show } from "./dom.js";

const REFRESH_MS = 3_000;

// `look` asks at once. In `trouble` the page says why nothing comes.
export function polling(path, page, trouble, shown) {
  let timer, gone = false;

  async function look() {
    clearTimeout(timer);
    try {
      const found = await get(path);
      if (gone) return;
      page.state("live");
      show(trouble);
      shown(found);
    } catch (error) {
      if (gone) return;
      if (error.status === 401) return page.refused(error);
      page.state("reconnecting");
      show(trouble, h("p", { class: "problem", role: "alert" }, error.message));
    }
    timer = setTimeout(look, REFRESH_MS);
  }

  look();
  return { look, leave: () => { gone = true; clearTimeout(timer); } };
}

// Runs the search's worker in a frame: browsers start no workers for pages that are opened from a folder.
"use strict";

if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(address) {
      super();
      this.onmessage = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      // In the frame, as in a worker, postMessage sends to the page, and importScripts loads scripts in turn.
      frame.srcdoc = `<body><script>
        postMessage = (data) => parent.postMessage(data, "*");
        importScripts = (...addresses) => addresses.reduce((before, src) => before.then(() => new Promise((done) => {
          const script = Object.assign(document.createElement("script"), { src, onload: done, onerror: done });
          document.body.append(script);
        })), Promise.resolve());
      </` + `script><script src="${new URL(address, location.href)}"></` + `script></body>`;
      this.loaded = new Promise((done) => frame.addEventListener("load", done));
      this.frame = frame;
      window.addEventListener("message", ({ source, data }) => {
        if (source !== frame.contentWindow) return;
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}

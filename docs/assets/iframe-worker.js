// From disk (file:) browsers refuse to start workers, and the site's search is one. This stands in: an iframe that
// runs the worker's script and passes messages on. With http it does nothing.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inner = frame.contentWindow
      window.addEventListener("message", (event) => {
        if (event.source !== inner) return
        event.stopImmediatePropagation()
        const passed = new MessageEvent("message", { data: event.data })
        this.dispatchEvent(passed)
        if (this.onmessage) this.onmessage(passed)
      })
      this.loaded = new Promise((resolve) => { frame.contentWindow.loaded = resolve })
      this.inner = inner
      inner.document.open()
      inner.document.write(`<script>
        const up = parent.postMessage.bind(parent)
        window.postMessage = (data) => up(data, "*")
        window.importScripts = (...all) => all.reduce((before, one) => before.then(() => new Promise((done) => {
          const script = document.createElement("script")
          script.src = one
          script.onload = done
          document.body.appendChild(script)
        })), Promise.resolve())
      <\/script><body><script src="${new URL(address, location.href)}"><\/script><script>loaded()<\/script></body>`)
      inner.document.close()
    }
    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {}
  }
}

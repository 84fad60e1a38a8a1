// A page that is opened from a disk may start no worker, which the search needs. There, and only there, this class takes the
// worker's place: it runs the script in a hidden frame of the page. ("iframe-worker" is what the theme looks for in its name.)
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html><body></body>"
      this.ready = new Promise(resolve => {
        frame.addEventListener("load", () => resolve(this.start(frame, url)), { once: true })
      })
      document.body.append(frame)
    }

    // The frame's window is to the script what the scope of a worker is: messages come in as events, and postMessage sends.
    start(frame, url) {
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = frame.contentDocument.createElement("script")
      script.src = url
      return new Promise((resolve, reject) => {
        script.addEventListener("load", () => resolve(inside))
        script.addEventListener("error", reject)
        frame.contentDocument.body.append(script)
      })
    }

    postMessage(data) {
      this.ready.then(inside => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
  }
}

// Search in a site that is opened from disk: browsers give pages of file:// no Web Worker, so it runs in a hidden frame.
// The theme's worker asks whether its parent has an IFrameWorker.
if (location.protocol === "file:")
  window.Worker = window.IFrameWorker = class IFrameWorker extends EventTarget {
    constructor(url) {
      super()
      const frame = document.body.appendChild(document.createElement("iframe"))
      frame.hidden = true
      const scope = frame.contentWindow
      scope.document.open()
      scope.document.write("<!doctype html><title></title><body></body>")
      scope.document.close()
      scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = scope.document.createElement("script")
      this.ready = new Promise(resolve => (script.onload = () => resolve(scope)))
      script.src = url
      scope.document.body.append(script)
    }
    async postMessage(data) {
      const scope = await this.ready
      scope.dispatchEvent(new scope.MessageEvent("message", { data }))
    }
    terminate() {}
  }

// Browsers start no worker from a file:// page, and the search of the theme needs one. This class
// runs the script of the worker in a hidden frame instead. The theme looks for the name
// IFrameWorker to find its dictionaries.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.ready = new Promise((resolve) => {
        const frame = document.createElement("iframe");
        frame.hidden = true;
        frame.title = "search";
        document.body.append(frame);
        const scope = frame.contentWindow;
        // What the script posts is a message of this worker.
        scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        const script = scope.document.createElement("script");
        script.src = url;
        script.onload = () => resolve(scope);
        scope.document.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then((scope) => scope.dispatchEvent(new scope.MessageEvent("message", { data })));
    }

    terminate() {}
  };
}

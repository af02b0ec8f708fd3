/* Stream capture: which calls it refuses, and how it ends in a graph. */
#include "sim_cuda.h"

#include <stdlib.h>
#include <string.h>

static struct cu_capture *captures;
static _Thread_local CUstreamCaptureMode thread_mode; /* CU_STREAM_CAPTURE_MODE_GLOBAL */

void cu_spoil(struct cu_capture *c) {
    c->status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
}

/* Whether capture c forbids potentially unsafe calls to this thread. */
static bool forbids(const struct cu_capture *c) {
    if (c->mode == CU_STREAM_CAPTURE_MODE_RELAXED || c->status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return false;
    return c->thread == cu_thread() || (c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                                        thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
}

CUresult cu_unsafe(void) {
    CUresult result = CUDA_SUCCESS;
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    for (struct cu_capture *c = captures; c; c = c->next)
        if (forbids(c)) {
            cu_spoil(c);
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    return result;
}

/* The legacy stream would wait for a blocking stream that is capturing. */
static CUresult implicit(const struct cu_stream *s, bool spoil) {
    if (!s->special || s == s->ctx->special[1])
        return CUDA_SUCCESS;
    CUresult result = CUDA_SUCCESS;
    for (struct cu_capture *c = captures; c; c = c->next)
        if (c->origin->ctx == s->ctx && !(c->origin->flags & CU_STREAM_NON_BLOCKING) &&
            !c->origin->special) {
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
            if (spoil)
                cu_spoil(c);
        }
    return result;
}

CUresult cu_enqueue(CUstream handle, CUgraphNodeType type, struct cu_stream **out,
                    struct cu_node **node) {
    CU_TRY(cu_stream(handle, out));
    struct cu_stream *s = *out;
    *node = NULL;
    if (!s->capture)
        return implicit(s, true);
    CU_CHECK(s->capture->status == CU_STREAM_CAPTURE_STATUS_ACTIVE,
             CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    *node = node_new(s->capture->graph, type, s->tail, (size_t)s->tails);
    CU_CHECK(*node, CUDA_ERROR_OUT_OF_MEMORY);
    s->tail[0] = *node;
    s->tails = 1;
    return CUDA_SUCCESS;
}

SIM_API(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode * mode), (mode)) {
    CU_TRY(cu_ready());
    CU_ARG(mode && *mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
    CUstreamCaptureMode old = thread_mode;
    thread_mode = *mode;
    *mode = old;
    return CUDA_SUCCESS;
}

static CUresult begin(CUstream handle, CUstreamCaptureMode mode, struct cu_graph *into) {
    struct cu_stream *s;
    CU_TRY(cu_stream(handle, &s));
    CU_ARG(mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
    CU_CHECK(!s->special || handle == CU_STREAM_PER_THREAD, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CU_CHECK(!s->capture, CUDA_ERROR_ILLEGAL_STATE);
    struct cu_capture *c = calloc(1, sizeof *c);
    CU_CHECK(c, CUDA_ERROR_OUT_OF_MEMORY);
    c->graph = into ? into : graph_new();
    if (!c->graph) {
        free(c);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    c->own_graph = !into;
    c->mode = mode;
    c->status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    c->thread = cu_thread();
    c->id = cu_next_id();
    c->origin = s;
    c->next = captures;
    captures = c;
    s->capture = c;
    s->tails = 0;
    return CUDA_SUCCESS;
}

SIM_PAIR(cuStreamBeginCapture_v2, (CUstream handle, CUstreamCaptureMode mode), (handle, mode)) {
    return begin(handle, mode, NULL);
}

SIM_PAIR(cuStreamBeginCapture, (CUstream handle), (handle)) {
    return begin(handle, CU_STREAM_CAPTURE_MODE_GLOBAL, NULL);
}

SIM_PAIR_NEW(cuStreamBeginCaptureToGraph,
             (CUstream handle, CUgraph graph, const CUgraphNode *deps, const CUgraphEdgeData *edges,
              size_t n, CUstreamCaptureMode mode),
             (handle, graph, deps, edges, n, mode)) {
    (void)edges;
    CU_TRY(cu_ready());
    CU_ARG(cu_handle_is(graph, K_GRAPH) && n <= TAILS && (n == 0 || deps));
    CU_TRY(begin(handle, mode, (struct cu_graph *)graph));
    struct cu_stream *s;
    CU_TRY(cu_stream(handle, &s));
    for (size_t i = 0; i < n; i++)
        s->tail[s->tails++] = (struct cu_node *)deps[i];
    return CUDA_SUCCESS;
}

/* Takes all streams out of the capture and forgets it. */
static void finish(struct cu_capture *c) {
    size_t at = 0;
    struct cu_stream *s;
    while ((s = cu_handle_next(K_STREAM, &at)))
        if (s->capture == c)
            s->capture = NULL;
    c->origin->capture = NULL;
    for (struct cu_capture **p = &captures; *p; p = &(*p)->next)
        if (*p == c) {
            *p = c->next;
            break;
        }
    free(c);
}

void capture_leave(struct cu_stream *s) {
    struct cu_capture *c = s->capture;
    if (!c)
        return;
    if (c->origin != s) {
        cu_spoil(c);
        s->capture = NULL;
        return;
    }
    if (c->own_graph)
        graph_free(c->graph);
    finish(c);
}

SIM_PAIR(cuStreamEndCapture, (CUstream handle, CUgraph *out), (handle, out)) {
    struct cu_stream *s;
    CU_TRY(cu_stream(handle, &s));
    CU_ARG(out);
    struct cu_capture *c = s->capture;
    CU_CHECK(c, CUDA_ERROR_ILLEGAL_STATE);
    CU_CHECK(c->origin == s, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    CU_CHECK(c->mode == CU_STREAM_CAPTURE_MODE_RELAXED || c->thread == cu_thread(),
             CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    bool good = c->status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
    *out = good ? (CUgraph)c->graph : NULL;
    if (!good && c->own_graph)
        graph_free(c->graph);
    finish(c);
    return good ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
}

SIM_PAIR(cuStreamIsCapturing, (CUstream handle, CUstreamCaptureStatus *status), (handle, status)) {
    struct cu_stream *s;
    CU_TRY(cu_stream(handle, &s));
    CU_ARG(status);
    CU_TRY(implicit(s, false));
    *status = s->capture ? s->capture->status : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

static CUresult capture_info(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id,
                             CUgraph *graph, const CUgraphNode **deps, size_t *n) {
    struct cu_stream *s;
    CU_TRY(cu_stream(handle, &s));
    CU_ARG(status);
    CU_TRY(implicit(s, false));
    *status = s->capture ? s->capture->status : CU_STREAM_CAPTURE_STATUS_NONE;
    if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return CUDA_SUCCESS;
    if (id)
        *id = s->capture->id;
    if (graph)
        *graph = (CUgraph)s->capture->graph;
    if (deps)
        *deps = (const CUgraphNode *)s->tail;
    if (n)
        *n = (size_t)s->tails;
    return CUDA_SUCCESS;
}

SIM_PAIR(cuStreamGetCaptureInfo, (CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id),
         (handle, status, id)) {
    return capture_info(handle, status, id, NULL, NULL, NULL);
}

SIM_PAIR_NEW(cuStreamGetCaptureInfo_v2,
             (CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
              const CUgraphNode **deps, size_t *n),
             (handle, status, id, graph, deps, n)) {
    return capture_info(handle, status, id, graph, deps, n);
}

SIM_PAIR_NEW(cuStreamGetCaptureInfo_v3,
             (CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
              const CUgraphNode **deps, const CUgraphEdgeData **edges, size_t *n),
             (handle, status, id, graph, deps, edges, n)) {
    if (edges)
        *edges = NULL;
    return capture_info(handle, status, id, graph, deps, n);
}

static CUresult update(CUstream handle, CUgraphNode *deps, size_t n, unsigned flags) {
    struct cu_stream *s;
    CU_TRY(cu_stream(handle, &s));
    CU_CHECK(s->capture, CUDA_ERROR_ILLEGAL_STATE);
    CU_ARG(n == 0 || deps);
    if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES)
        s->tails = 0;
    CU_ARG((size_t)s->tails + n <= TAILS);
    for (size_t i = 0; i < n; i++)
        s->tail[s->tails++] = (struct cu_node *)deps[i];
    return CUDA_SUCCESS;
}

SIM_PAIR_NEW(cuStreamUpdateCaptureDependencies,
             (CUstream handle, CUgraphNode *deps, size_t n, unsigned flags),
             (handle, deps, n, flags)) {
    return update(handle, deps, n, flags);
}

SIM_PAIR_NEW(cuStreamUpdateCaptureDependencies_v2,
             (CUstream handle, CUgraphNode *deps, const CUgraphEdgeData *edges, size_t n,
              unsigned flags),
             (handle, deps, edges, n, flags)) {
    (void)edges;
    return update(handle, deps, n, flags);
}

/* ---- events ---- */

struct event {
    struct cu_obj obj;
    unsigned flags;
    bool recorded;
    uint64_t stream;
    struct cu_capture *capture;
    struct cu_node *tail[TAILS];
    int tails;
};

static void destroy_event(void *p) {
    cu_handle_del(p);
    free(p);
}

static CUresult event(CUevent handle, struct event **out) {
    CU_TRY(cu_ready());
    CU_CHECK(cu_handle_is(handle, K_EVENT), CUDA_ERROR_INVALID_HANDLE);
    *out = (struct event *)handle;
    return CUDA_SUCCESS;
}

SIM_API(cuEventCreate, (CUevent * out, unsigned flags), (out, flags)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    CU_ARG(out && flags <= 7);
    struct event *e = calloc(1, sizeof *e);
    if (!e || !cu_handle_add(e, K_EVENT)) {
        free(e);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    e->obj = (struct cu_obj){ctx, destroy_event};
    e->flags = flags;
    *out = (CUevent)e;
    return CUDA_SUCCESS;
}

SIM_API(cuEventDestroy_v2, (CUevent handle), (handle)) {
    struct event *e;
    CU_TRY(event(handle, &e));
    destroy_event(e);
    return CUDA_SUCCESS;
}
SIM_TWIN(cuEventDestroy, cuEventDestroy_v2, (CUevent handle), (handle))

static CUresult record(CUevent handle, CUstream stream) {
    struct event *e;
    struct cu_stream *s;
    CU_TRY(event(handle, &e));
    CU_TRY(cu_stream(stream, &s));
    e->recorded = true;
    e->stream = s->id;
    e->capture = s->capture;
    e->tails = s->capture ? s->tails : 0;
    memcpy(e->tail, s->tail, sizeof e->tail);
    return CUDA_SUCCESS;
}

SIM_PAIR(cuEventRecord, (CUevent handle, CUstream stream), (handle, stream)) {
    return record(handle, stream);
}

SIM_PAIR(cuEventRecordWithFlags, (CUevent handle, CUstream stream, unsigned flags),
         (handle, stream, flags)) {
    CU_ARG(flags <= CU_EVENT_RECORD_EXTERNAL);
    return record(handle, stream);
}

SIM_API(cuEventQuery, (CUevent handle), (handle)) {
    struct event *e;
    CU_TRY(event(handle, &e));
    CU_CHECK(!e->capture, CUDA_ERROR_CAPTURED_EVENT);
    return CUDA_SUCCESS;
}

SIM_API(cuEventSynchronize, (CUevent handle), (handle)) {
    struct event *e;
    CU_TRY(event(handle, &e));
    CU_CHECK(!e->capture, CUDA_ERROR_CAPTURED_EVENT);
    if (e->recorded)
        cu_synced(e->stream);
    return CUDA_SUCCESS;
}

SIM_API(cuEventElapsedTime, (float *ms, CUevent start, CUevent end), (ms, start, end)) {
    struct event *a, *b;
    CU_TRY(event(start, &a));
    CU_TRY(event(end, &b));
    CU_ARG(ms);
    CU_CHECK(a->recorded && b->recorded, CUDA_ERROR_INVALID_HANDLE);
    *ms = 0.001f;
    return CUDA_SUCCESS;
}
SIM_TWIN_NEW(cuEventElapsedTime_v2, cuEventElapsedTime, (float *ms, CUevent start, CUevent end),
             (ms, start, end))

SIM_PAIR(cuStreamWaitEvent, (CUstream stream, CUevent handle, unsigned flags),
         (stream, handle, flags)) {
    struct event *e;
    struct cu_stream *s;
    CU_TRY(event(handle, &e));
    CU_TRY(cu_stream(stream, &s));
    CU_ARG(flags <= CU_EVENT_WAIT_EXTERNAL);
    if (!e->capture) {
        CU_CHECK(!s->capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
        return CUDA_SUCCESS;
    }
    CU_CHECK(!s->capture || s->capture == e->capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
    if (!s->capture)
        s->tails = 0;
    s->capture = e->capture;
    for (int i = 0; i < e->tails && s->tails < TAILS; i++)
        s->tail[s->tails++] = e->tail[i];
    return CUDA_SUCCESS;
}

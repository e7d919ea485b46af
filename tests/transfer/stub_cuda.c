/* A libcuda.so for the tests. It moves bytes with memcpy and refuses what cuda.h does not allow.
 *
 * It is compiled against NVIDIA's own cuda.h, so the compiler compares each function here with
 * NVIDIA's prototype. Each call is put into a log: the value of each argument, its size, and the
 * size of what a pointer points to, all as the compiler sees them. tests/transfer/stub_driver.py
 * reads the log.
 *
 * - "Device memory" is host memory that cuMemAlloc gave. Device and host addresses are told apart
 *   by looking them up, and every address is checked before it is used.
 * - Streams, events and contexts are numbers with a pattern in their upper 32 bits, so a handle
 *   that was cut to 32 bits is not a handle, nor is one of another kind.
 * - A copy happens during the call. An event and a stream say "not ready" once after each piece of
 *   work. Real time and real order are not imitated: tests.support.gpu.fake_cuda does that.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if CUDA_VERSION != 12080
#error "the stub is written for the cuda.h of CUDA 12.8"
#endif

/* ------------------------------------------------------------------ the log */

enum { MOST_ARGUMENTS = 9, MOST_CALLS = 1 << 16, MOST_HANDLES = 1 << 14, MOST_RANGES = 256 };

typedef struct {
    uint64_t value;
    uint32_t size, pointee; /* bytes; pointee: 0 for what is no pointer to a known type */
} Argument;

typedef struct {
    char name[44];
    int32_t result;
    int32_t mode; /* the thread's capture mode */
    uint32_t count;
    Argument arguments[MOST_ARGUMENTS];
} Call;

Call stub_log[MOST_CALLS];
uint64_t stub_calls;           /* also those for which the log has no room */
CUmemcpyAttributes stub_attributes; /* of the last batch */
int stub_version = 13000;      /* what cuDriverGetVersion says */
int stub_capturing;            /* whether each stream is being captured */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

static Call *begin(const char *name, const Argument *arguments, size_t count)
{
    static Call beyond;
    pthread_mutex_lock(&lock);
    Call *call = stub_calls < MOST_CALLS ? &stub_log[stub_calls] : &beyond;
    stub_calls++;
    strncpy(call->name, name, sizeof call->name - 1);
    call->mode = mode;
    call->count = count;
    memcpy(call->arguments, arguments, count * sizeof *arguments);
    return call;
}

static CUresult end(Call *call, CUresult result)
{
    call->result = result;
    pthread_mutex_unlock(&lock);
    return result;
}

#define VALUE(x) {(uint64_t)(x), sizeof(x), 0}
#define POINTER(p) {(uint64_t)(p), sizeof(p), sizeof(*(p))}
#define BEGIN(...)                                                                             \
    const Argument arguments_[] = {__VA_ARGS__};                                               \
    Call *call = begin(__func__, arguments_, sizeof arguments_ / sizeof *arguments_)
#define END(result) return end(call, result)
#define REFUSE_UNLESS(condition, result)                                                       \
    do {                                                                                       \
        if (!(condition))                                                                      \
            END(result);                                                                       \
    } while (0)
#define VALID(condition) REFUSE_UNLESS(condition, CUDA_ERROR_INVALID_VALUE)
#define HANDLE_VALID(condition) REFUSE_UNLESS(condition, CUDA_ERROR_INVALID_HANDLE)

/* ------------------------------------------------------------------ what there is */

enum { CONTEXT, STREAM, EVENT, KINDS };
static const uint64_t pattern[KINDS] = {0xC0A7E871ull << 32, 0x57A3EA17ull << 32, 0xE7E47193ull << 32};

typedef struct {
    int live, busy;
} State;
static State states[KINDS][MOST_HANDLES];
static uint64_t made[KINDS];

typedef struct {
    uint64_t address;
    size_t bytes;
} Range;
static Range device_ranges[MOST_RANGES], host_ranges[MOST_RANGES];
static int initialised;

static __thread CUcontext stack[64];
static __thread int depth;

static uint64_t make(int kind)
{
    uint64_t number = ++made[kind]; /* never used again, so that a late use is noticed */
    if (number >= MOST_HANDLES)
        return 0;
    states[kind][number].live = 1;
    return pattern[kind] | number;
}

static State *state_of(int kind, const void *handle)
{
    uint64_t value = (uint64_t)handle, number = value & 0xFFFFFFFF;
    if ((value ^ number) != pattern[kind] || number >= MOST_HANDLES || !states[kind][number].live)
        return NULL;
    return &states[kind][number];
}

static State *stream_of(CUstream stream)
{
    static State legacy = {1, 0}; /* the NULL stream is CUDA's legacy one */
    return stream ? state_of(STREAM, stream) : &legacy;
}

/* Whether the memory is mapped. What may be done there is not looked at. */
static int mapped(const void *address, size_t bytes)
{
    uint64_t page = sysconf(_SC_PAGESIZE), begins = (uint64_t)address & ~(page - 1);
    uint64_t ends = (uint64_t)address + bytes;
    return address && ends >= begins && !msync((void *)begins, ends - begins, MS_ASYNC);
}

static Range *around(Range *ranges, uint64_t address, size_t bytes)
{
    for (Range *range = ranges; range < ranges + MOST_RANGES; range++)
        if (range->bytes && address >= range->address && bytes <= range->bytes &&
            address - range->address <= range->bytes - bytes)
            return range;
    return NULL;
}

static int touches(Range *ranges, uint64_t address, size_t bytes)
{
    for (Range *range = ranges; range < ranges + MOST_RANGES; range++)
        if (range->bytes && address < range->address + range->bytes &&
            range->address < address + bytes)
            return 1;
    return 0;
}

static Range *add(Range *ranges, uint64_t address, size_t bytes)
{
    for (Range *range = ranges; range < ranges + MOST_RANGES; range++)
        if (!range->bytes) {
            *range = (Range){address, bytes};
            return range;
        }
    return NULL;
}

static int on_device(CUdeviceptr address, size_t bytes)
{
    return around(device_ranges, address, bytes) != NULL;
}

static int on_host(const void *address, size_t bytes)
{
    return !touches(device_ranges, (uint64_t)address, bytes) && mapped(address, bytes);
}

static int pinned(uint64_t address, size_t bytes)
{
    return around(host_ranges, address, bytes) != NULL;
}

/* How much was made and not given back: streams, events, pinned ranges, device allocations. */
void stub_left(uint64_t left[4])
{
    memset(left, 0, 4 * sizeof *left);
    for (int n = 0; n < MOST_HANDLES; n++) {
        left[0] += states[STREAM][n].live;
        left[1] += states[EVENT][n].live;
    }
    for (int n = 0; n < MOST_RANGES; n++) {
        left[2] += host_ranges[n].bytes != 0;
        left[3] += device_ranges[n].bytes != 0;
    }
}

#define INITIALISED REFUSE_UNLESS(initialised, CUDA_ERROR_NOT_INITIALIZED)
#define IN_CONTEXT                                                                             \
    INITIALISED;                                                                               \
    REFUSE_UNLESS(depth &&state_of(CONTEXT, stack[depth - 1]), CUDA_ERROR_INVALID_CONTEXT)
#define DEVICE_VALID REFUSE_UNLESS(dev == 0, CUDA_ERROR_INVALID_DEVICE)

/* ------------------------------------------------------------------ driver and devices */

CUresult CUDAAPI cuInit(unsigned int Flags)
{
    BEGIN(VALUE(Flags));
    VALID(Flags == 0);
    initialised = 1;
    END(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDriverGetVersion(int *driverVersion)
{
    BEGIN(POINTER(driverVersion));
    VALID(mapped(driverVersion, sizeof *driverVersion));
    *driverVersion = stub_version;
    END(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceGetCount(int *count)
{
    BEGIN(POINTER(count));
    INITIALISED;
    VALID(mapped(count, sizeof *count));
    *count = 1;
    END(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal)
{
    BEGIN(POINTER(device), VALUE(ordinal));
    INITIALISED;
    VALID(mapped(device, sizeof *device));
    REFUSE_UNLESS(ordinal == 0, CUDA_ERROR_INVALID_DEVICE);
    *device = 0;
    END(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceGetName(char *name, int len, CUdevice dev)
{
    static const char ours[] = "NVIDIA Stub";
    BEGIN(POINTER(name), VALUE(len), VALUE(dev));
    INITIALISED;
    DEVICE_VALID;
    VALID(len >= (int)sizeof ours && mapped(name, len));
    memcpy(name, ours, sizeof ours);
    END(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceTotalMem(size_t *bytes, CUdevice dev)
{
    BEGIN(POINTER(bytes), VALUE(dev));
    INITIALISED;
    DEVICE_VALID;
    VALID(mapped(bytes, sizeof *bytes));
    *bytes = (139ull << 30) + 4096;
    END(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev)
{
    BEGIN(POINTER(pi), VALUE(attrib), VALUE(dev));
    INITIALISED;
    DEVICE_VALID;
    VALID(mapped(pi, sizeof *pi));
    switch (attrib) {
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
        *pi = 1;
        break;
    case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES:
        *pi = 0;
        break;
    default:
        END(CUDA_ERROR_INVALID_VALUE);
    }
    END(CUDA_SUCCESS);
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char **pStr)
{
    BEGIN(VALUE(error), POINTER(pStr));
    VALID(mapped(pStr, sizeof *pStr));
    switch (error) {
    case CUDA_ERROR_INVALID_VALUE:
        *pStr = "invalid argument";
        break;
    case CUDA_ERROR_INVALID_CONTEXT:
        *pStr = "invalid device context";
        break;
    case CUDA_ERROR_INVALID_HANDLE:
        *pStr = "invalid resource handle";
        break;
    default:
        *pStr = NULL;
        END(CUDA_ERROR_INVALID_VALUE);
    }
    END(CUDA_SUCCESS);
}

/* The form of CUDA 13, which no cuda.h of CUDA 12 declares: without failIdx. Written by hand. */
CUresult CUDAAPI cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes,
                                       size_t count, CUmemcpyAttributes *attrs, size_t *attrsIdxs,
                                       size_t numAttrs, CUstream hStream);

/* As a driver of CUDA 13: each version is given its own form. It is asked for one symbol only; for
 * another one CUDA would say success and give NULL. */
CUresult CUDAAPI cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion,
                                  cuuint64_t flags, CUdriverProcAddressQueryResult *symbolStatus)
{
    BEGIN(POINTER(symbol), POINTER(pfn), VALUE(cudaVersion), VALUE(flags), POINTER(symbolStatus));
    VALID(mapped(symbol, sizeof "cuMemcpyBatchAsync") && mapped(pfn, sizeof *pfn));
    VALID(flags <= CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
    VALID(!symbolStatus || mapped(symbolStatus, sizeof *symbolStatus));
    VALID(!strcmp(symbol, "cuMemcpyBatchAsync") && cudaVersion >= 2000);
    if (cudaVersion > stub_version || cudaVersion < 12080)
        *pfn = NULL;
    else
        *pfn = cudaVersion < 13000 ? (void *)cuMemcpyBatchAsync : (void *)cuMemcpyBatchAsync_v2;
    END(CUDA_SUCCESS);
}

/* ------------------------------------------------------------------ contexts and captures */

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
    static uint64_t primary;
    BEGIN(POINTER(pctx), VALUE(dev));
    INITIALISED;
    DEVICE_VALID;
    VALID(mapped(pctx, sizeof *pctx));
    if (!primary)
        primary = make(CONTEXT);
    *pctx = (CUcontext)primary;
    END(CUDA_SUCCESS);
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext ctx)
{
    BEGIN(VALUE(ctx));
    INITIALISED;
    REFUSE_UNLESS(state_of(CONTEXT, ctx), CUDA_ERROR_INVALID_CONTEXT);
    VALID(depth < (int)(sizeof stack / sizeof *stack));
    stack[depth++] = ctx;
    END(CUDA_SUCCESS);
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext *pctx)
{
    BEGIN(POINTER(pctx));
    INITIALISED;
    REFUSE_UNLESS(depth, CUDA_ERROR_INVALID_CONTEXT);
    VALID(!pctx || mapped(pctx, sizeof *pctx));
    depth--;
    if (pctx)
        *pctx = stack[depth];
    END(CUDA_SUCCESS);
}

/* Of the calling thread: how many contexts it has pushed, and its capture mode. */
void stub_thread(int found[2])
{
    found[0] = depth;
    found[1] = mode;
}

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode_)
{
    BEGIN(POINTER(mode_));
    INITIALISED;
    VALID(mapped(mode_, sizeof *mode_) && *mode_ <= CU_STREAM_CAPTURE_MODE_RELAXED);
    CUstreamCaptureMode before = mode;
    mode = *mode_;
    *mode_ = before;
    END(CUDA_SUCCESS);
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus *captureStatus)
{
    BEGIN(VALUE(hStream), POINTER(captureStatus));
    IN_CONTEXT;
    HANDLE_VALID(stream_of(hStream));
    VALID(mapped(captureStatus, sizeof *captureStatus));
    *captureStatus =
        stub_capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    END(CUDA_SUCCESS);
}

/* ------------------------------------------------------------------ streams and events */

CUresult CUDAAPI cuCtxGetStreamPriorityRange(int *leastPriority, int *greatestPriority)
{
    BEGIN(POINTER(leastPriority), POINTER(greatestPriority));
    IN_CONTEXT;
    VALID(mapped(leastPriority, sizeof *leastPriority));
    VALID(mapped(greatestPriority, sizeof *greatestPriority));
    *leastPriority = 0;
    *greatestPriority = -5;
    END(CUDA_SUCCESS);
}

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority)
{
    BEGIN(POINTER(phStream), VALUE(flags), VALUE(priority));
    IN_CONTEXT;
    VALID(mapped(phStream, sizeof *phStream));
    VALID(flags == CU_STREAM_DEFAULT || flags == CU_STREAM_NON_BLOCKING);
    VALID(priority >= -5 && priority <= 0); /* CUDA would take the nearest */
    *phStream = (CUstream)make(STREAM);
    END(CUDA_SUCCESS);
}

CUresult CUDAAPI cuStreamDestroy(CUstream hStream)
{
    BEGIN(VALUE(hStream));
    IN_CONTEXT;
    HANDLE_VALID(hStream && stream_of(hStream));
    stream_of(hStream)->live = 0;
    END(CUDA_SUCCESS);
}

static CUresult asked(State *state)
{
    if (!state->busy)
        return CUDA_SUCCESS;
    state->busy = 0;
    return CUDA_ERROR_NOT_READY;
}

CUresult CUDAAPI cuStreamQuery(CUstream hStream)
{
    BEGIN(VALUE(hStream));
    IN_CONTEXT;
    HANDLE_VALID(stream_of(hStream));
    END(asked(stream_of(hStream)));
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
    BEGIN(VALUE(hStream), VALUE(hEvent), VALUE(Flags));
    IN_CONTEXT;
    HANDLE_VALID(stream_of(hStream) && state_of(EVENT, hEvent));
    VALID(Flags == CU_EVENT_WAIT_DEFAULT || Flags == CU_EVENT_WAIT_EXTERNAL);
    END(CUDA_SUCCESS);
}

CUresult CUDAAPI cuEventCreate(CUevent *phEvent, unsigned int Flags)
{
    BEGIN(POINTER(phEvent), VALUE(Flags));
    IN_CONTEXT;
    VALID(mapped(phEvent, sizeof *phEvent));
    VALID(!(Flags & ~(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS)));
    VALID(!(Flags & CU_EVENT_INTERPROCESS) || (Flags & CU_EVENT_DISABLE_TIMING));
    *phEvent = (CUevent)make(EVENT);
    END(CUDA_SUCCESS);
}

CUresult CUDAAPI cuEventRecord(CUevent hEvent, CUstream hStream)
{
    BEGIN(VALUE(hEvent), VALUE(hStream));
    IN_CONTEXT;
    HANDLE_VALID(state_of(EVENT, hEvent) && stream_of(hStream));
    state_of(EVENT, hEvent)->busy = 1;
    END(CUDA_SUCCESS);
}

CUresult CUDAAPI cuEventQuery(CUevent hEvent)
{
    BEGIN(VALUE(hEvent));
    IN_CONTEXT;
    HANDLE_VALID(state_of(EVENT, hEvent));
    END(asked(state_of(EVENT, hEvent)));
}

CUresult CUDAAPI cuEventDestroy(CUevent hEvent)
{
    BEGIN(VALUE(hEvent));
    IN_CONTEXT;
    HANDLE_VALID(state_of(EVENT, hEvent));
    state_of(EVENT, hEvent)->live = 0;
    END(CUDA_SUCCESS);
}

/* ------------------------------------------------------------------ memory */

CUresult CUDAAPI cuMemAlloc(CUdeviceptr *dptr, size_t bytesize)
{
    BEGIN(POINTER(dptr), VALUE(bytesize));
    IN_CONTEXT;
    VALID(bytesize && mapped(dptr, sizeof *dptr));
    void *memory = mmap(NULL, bytesize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REFUSE_UNLESS(memory != MAP_FAILED && add(device_ranges, (uint64_t)memory, bytesize),
                  CUDA_ERROR_OUT_OF_MEMORY);
    *dptr = (CUdeviceptr)memory;
    END(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemFree(CUdeviceptr dptr)
{
    BEGIN(VALUE(dptr));
    IN_CONTEXT;
    Range *range = around(device_ranges, dptr, 1);
    VALID(range && range->address == dptr);
    munmap((void *)dptr, range->bytes);
    range->bytes = 0;
    END(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemHostRegister(void *p, size_t bytesize, unsigned int Flags)
{
    BEGIN(VALUE(p), VALUE(bytesize), VALUE(Flags));
    IN_CONTEXT;
    VALID(!(Flags & ~(CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                      CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY)));
    VALID(bytesize && on_host(p, bytesize));
    REFUSE_UNLESS(!touches(host_ranges, (uint64_t)p, bytesize),
                  CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    REFUSE_UNLESS(add(host_ranges, (uint64_t)p, bytesize), CUDA_ERROR_OUT_OF_MEMORY);
    END(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemHostUnregister(void *p)
{
    BEGIN(VALUE(p));
    IN_CONTEXT;
    Range *range = around(host_ranges, (uint64_t)p, 1);
    REFUSE_UNLESS(range && range->address == (uint64_t)p,
                  CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    range->bytes = 0;
    END(CUDA_SUCCESS);
}

/* ------------------------------------------------------------------ copies */

CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount,
                                   CUstream hStream)
{
    BEGIN(VALUE(dstDevice), VALUE(srcHost), VALUE(ByteCount), VALUE(hStream));
    IN_CONTEXT;
    HANDLE_VALID(stream_of(hStream));
    VALID(on_device(dstDevice, ByteCount) && on_host(srcHost, ByteCount));
    memcpy((void *)dstDevice, srcHost, ByteCount);
    stream_of(hStream)->busy = 1;
    END(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemcpyDtoHAsync(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount,
                                   CUstream hStream)
{
    BEGIN(VALUE(dstHost), VALUE(srcDevice), VALUE(ByteCount), VALUE(hStream));
    IN_CONTEXT;
    HANDLE_VALID(stream_of(hStream));
    VALID(on_device(srcDevice, ByteCount) && on_host(dstHost, ByteCount));
    memcpy(dstHost, (void *)srcDevice, ByteCount);
    stream_of(hStream)->busy = 1;
    END(CUDA_SUCCESS);
}

static int location_valid(CUmemLocation location)
{
    return location.type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
}

static int attributes_valid(const CUmemcpyAttributes *attrs)
{
    return attrs->srcAccessOrder >= CU_MEMCPY_SRC_ACCESS_ORDER_STREAM &&
           attrs->srcAccessOrder <= CU_MEMCPY_SRC_ACCESS_ORDER_ANY &&
           location_valid(attrs->srcLocHint) && location_valid(attrs->dstLocHint) &&
           !(attrs->flags & ~(unsigned)CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
}

/* CUDA takes host memory that is not pinned, too. kvass gives a batch pinned memory only. */
static CUresult batch(const CUdeviceptr *dsts, const CUdeviceptr *srcs, const size_t *sizes,
                      size_t count, const CUmemcpyAttributes *attrs, const size_t *attrsIdxs,
                      size_t numAttrs, size_t *failIdx, CUstream hStream)
{
    if (!hStream || !state_of(STREAM, hStream))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!count || count > 1 << 24 || numAttrs != 1 || !mapped(dsts, count * sizeof *dsts) ||
        !mapped(srcs, count * sizeof *srcs) || !mapped(sizes, count * sizeof *sizes) ||
        !mapped(attrs, sizeof *attrs) || !mapped(attrsIdxs, sizeof *attrsIdxs))
        return CUDA_ERROR_INVALID_VALUE;
    stub_attributes = *attrs;
    if (*attrsIdxs != 0 || !attributes_valid(attrs))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t n = 0; n < count; n++) {
        *failIdx = n;
        if (!sizes[n] ||
            !((on_device(dsts[n], sizes[n]) && pinned(srcs[n], sizes[n])) ||
              (on_device(srcs[n], sizes[n]) && pinned(dsts[n], sizes[n]))))
            return CUDA_ERROR_INVALID_VALUE;
    }
    *failIdx = SIZE_MAX;
    for (size_t n = 0; n < count; n++)
        memcpy((void *)dsts[n], (void *)srcs[n], sizes[n]);
    state_of(STREAM, hStream)->busy = 1;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes,
                                    size_t count, CUmemcpyAttributes *attrs, size_t *attrsIdxs,
                                    size_t numAttrs, size_t *failIdx, CUstream hStream)
{
    BEGIN(VALUE(dsts), VALUE(srcs), VALUE(sizes), VALUE(count), POINTER(attrs),
          POINTER(attrsIdxs), VALUE(numAttrs), POINTER(failIdx), VALUE(hStream));
    IN_CONTEXT;
    VALID(mapped(failIdx, sizeof *failIdx));
    *failIdx = SIZE_MAX;
    END(batch(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, hStream));
}

CUresult CUDAAPI cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes,
                                       size_t count, CUmemcpyAttributes *attrs, size_t *attrsIdxs,
                                       size_t numAttrs, CUstream hStream)
{
    size_t failed;
    BEGIN(VALUE(dsts), VALUE(srcs), VALUE(sizes), VALUE(count), POINTER(attrs),
          POINTER(attrsIdxs), VALUE(numAttrs), VALUE(hStream));
    IN_CONTEXT;
    END(batch(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, &failed, hStream));
}

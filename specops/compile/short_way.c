/* What stands between a call and its replay, as one C function; short_way.py has the same in Python, and says why.

   Nothing here knows torch: forms, addresses, streams and the replay are asked of the functions that short_way.py calls.
   What is saved is the interpreter between them, and ctypes around the driver's launch. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

enum { MAX_FIELDS = 8 };

typedef void *(*address_fn)(PyObject *);
typedef int (*launch_fn)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                         void **);

/* Objects that a way holds. */
enum {
    FORMS,                                        /* list of callables: whether tensors are of a known form */
    ADDRESS,                                      /* Tensor.data_ptr */
    DEVICE, STREAM, INDEX,                        /* the current device; a device's current raw stream; the fields' device */
    FREED, CHILDREN, COPIES,                      /* lists, see static_tensors.py */
    HOLDERS, NAMES, AT, ADDRESSES, PLACES,
    READY,                                        /* its attribute replay is called last */
    REPLAY,                                       /* that attribute's name */
    OWNERS,                                       /* of values and params, and of what tells of freed memory */
    COUNT
};

typedef struct {
    PyObject_HEAD
    PyObject *held[COUNT];
    address_fn address;                           /* of a tensor that fits a form, by torch's C function; or NULL */
    launch_fn launch;
    void *function;
    unsigned shape[7];                            /* grid, block, shared memory */
    uint64_t *values;                             /* the kernel's arguments; the addresses of fields come first */
    void **params;
    Py_ssize_t num_fields;
} Way;

static int way_traverse(Way *w, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(w));
    for (int i = 0; i < COUNT; i++)
        Py_VISIT(w->held[i]);
    return 0;
}

static int way_clear(Way *w)
{
    for (int i = 0; i < COUNT; i++)
        Py_CLEAR(w->held[i]);
    return 0;
}

static void way_dealloc(Way *w)
{
    PyTypeObject *type = Py_TYPE(w);
    PyObject_GC_UnTrack(w);
    way_clear(w);
    type->tp_free((PyObject *)w);
    Py_DECREF(type);
}

/* Way(held, address, (launch, function, values, params), (grid and block and shared memory), num_fields) */
static PyObject *way_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *held;
    unsigned long long address, launch, function, values, params;
    unsigned s[7];
    Py_ssize_t num_fields;
    static const int lists[] = {FORMS, FREED, CHILDREN, COPIES, HOLDERS, NAMES, ADDRESSES, PLACES};
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs) != 0) {
        PyErr_SetString(PyExc_TypeError, "no argument goes by name");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!K(KKKK)(IIIIIII)n", &PyTuple_Type, &held, &address, &launch, &function, &values, &params, &s[0],
                          &s[1], &s[2], &s[3], &s[4], &s[5], &s[6], &num_fields))
        return NULL;
    int wrong = PyTuple_GET_SIZE(held) != COUNT || num_fields < 1 || num_fields > MAX_FIELDS;
    for (size_t i = 0; !wrong && i < sizeof lists / sizeof *lists; i++)
        wrong = !PyList_CheckExact(PyTuple_GET_ITEM(held, lists[i]));
    if (wrong || PyList_GET_SIZE(PyTuple_GET_ITEM(held, HOLDERS)) != PyList_GET_SIZE(PyTuple_GET_ITEM(held, NAMES))) {
        PyErr_SetString(PyExc_ValueError, "these objects make no short way");
        return NULL;
    }
    Way *w = (Way *)type->tp_alloc(type, 0);
    if (w == NULL)
        return NULL;
    for (int i = 0; i < COUNT; i++) {
        w->held[i] = PyTuple_GET_ITEM(held, i);
        Py_INCREF(w->held[i]);
    }
    w->address = (address_fn)(uintptr_t)address;
    w->launch = (launch_fn)(uintptr_t)launch;
    w->function = (void *)(uintptr_t)function;
    w->values = (uint64_t *)(uintptr_t)values;
    w->params = (void **)(uintptr_t)params;
    w->num_fields = num_fields;
    for (int i = 0; i < 7; i++)
        w->shape[i] = s[i];
    return (PyObject *)w;
}

/* The functions below answer 1 for yes, 0 for no, -1 with an exception set. */

static int truth(PyObject *result)
{
    if (result == NULL)
        return -1;
    int yes = PyObject_IsTrue(result);
    Py_DECREF(result);
    return yes;
}

static int number(PyObject *result, uint64_t *value)
{
    if (result == NULL)
        return -1;
    *value = PyLong_AsUnsignedLongLong(result);
    Py_DECREF(result);
    return PyErr_Occurred() ? -1 : 1;
}

/* One of the known forms. */
static int fits(Way *w, PyObject *const *fields)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(w->held[FORMS]); i++) {
        PyObject *form = PyList_GET_ITEM(w->held[FORMS], i);
        Py_INCREF(form);
        int yes = truth(PyObject_Vectorcall(form, fields, (size_t)w->num_fields, NULL));
        Py_DECREF(form);
        if (yes != 0)
            return yes;
    }
    return 0;
}

/* Copies the fields into the static buffers. */
static int stage(Way *w, PyObject *const *fields)
{
    uint64_t found[MAX_FIELDS], all = 0, stream;
    for (Py_ssize_t i = 0; i < w->num_fields; i++) {
        if (w->address != NULL)
            found[i] = (uint64_t)(uintptr_t)w->address(fields[i]);
        else if (number(PyObject_CallOneArg(w->held[ADDRESS], fields[i]), &found[i]) < 0)
            return -1;
        all |= found[i];
    }
    /* Triton compiled the kernel for addresses that are multiples of 16. */
    if (all & 15)
        return 0;
    PyObject *device = PyObject_CallNoArgs(w->held[DEVICE]);
    if (device == NULL)
        return -1;
    int here = PyObject_RichCompareBool(device, w->held[INDEX], Py_EQ);
    Py_DECREF(device);
    if (here <= 0)
        return here;
    if (number(PyObject_CallOneArg(w->held[STREAM], w->held[INDEX]), &stream) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < w->num_fields; i++)
        w->values[i] = found[i];
    const unsigned *s = w->shape;
    int error;
    /* A full queue makes the driver wait. */
    Py_BEGIN_ALLOW_THREADS
    error = w->launch(w->function, s[0], s[1], s[2], s[3], s[4], s[5], s[6], (void *)(uintptr_t)stream, w->params, NULL);
    Py_END_ALLOW_THREADS
    return error == 0;
}

/* Everything that the graph reads is where it was. */
static int in_place(Way *w)
{
    if (PyList_GET_SIZE(w->held[FREED]) != 0)
        return 0;
    int same = PyObject_RichCompareBool(w->held[CHILDREN], w->held[COPIES], Py_EQ);
    if (same <= 0)
        return same;
    Py_ssize_t count = PyList_GET_SIZE(w->held[HOLDERS]);
    PyObject *current = PyList_New(count);
    if (current == NULL)
        return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *tensor = PyObject_GetItem(PyList_GET_ITEM(w->held[HOLDERS], i), PyList_GET_ITEM(w->held[NAMES], i));
        if (tensor == NULL) {
            Py_DECREF(current);
            return -1;
        }
        PyList_SET_ITEM(current, i, tensor);
    }
    PyObject *arguments[] = {current, w->held[ADDRESSES], w->held[PLACES]};
    same = truth(PyObject_Vectorcall(w->held[AT], arguments, 3, NULL));
    Py_DECREF(current);
    return same;
}

/* What a wrong batch or a moved tensor raises is for the long way to tell. */
static int quiet(int answer)
{
    if (answer < 0 && (PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_ValueError) ||
                       PyErr_ExceptionMatches(PyExc_KeyError) || PyErr_ExceptionMatches(PyExc_RuntimeError))) {
        PyErr_Clear();
        return 0;
    }
    return answer;
}

static PyObject *way_go(Way *w, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "go takes the fields, and whether they are staged");
        return NULL;
    }
    PyObject *fields = PySequence_Fast(args[0], "the fields come in a sequence");
    if (fields == NULL)
        return NULL;
    PyObject *const *items = PySequence_Fast_ITEMS(fields);
    int staged = PyObject_IsTrue(args[1]);
    int yes = staged < 0 ? -1 : PySequence_Fast_GET_SIZE(fields) == w->num_fields;
    if (yes > 0)
        yes = quiet(fits(w, items));
    if (yes > 0 && !staged)
        yes = quiet(stage(w, items));
    Py_DECREF(fields);
    if (yes > 0)
        yes = quiet(in_place(w));
    if (yes < 0)
        return NULL;
    if (yes == 0)
        Py_RETURN_FALSE;
    PyObject *replay = PyObject_GetAttr(w->held[READY], w->held[REPLAY]);
    if (replay == NULL)
        return NULL;
    PyObject *done = PyObject_CallNoArgs(replay);
    Py_DECREF(replay);
    if (done == NULL)
        return NULL;
    Py_DECREF(done);
    Py_RETURN_TRUE;
}

static PyMethodDef way_methods[] = {
    {"go", (PyCFunction)(void (*)(void))way_go, METH_FASTCALL, "go(fields, staged) -> bool"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot way_slots[] = {
    {Py_tp_new, way_new},           {Py_tp_dealloc, way_dealloc}, {Py_tp_traverse, way_traverse},
    {Py_tp_clear, way_clear},       {Py_tp_methods, way_methods}, {0, NULL},
};

static PyType_Spec way_spec = {
    "specops_short_way.Way", sizeof(Way), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, way_slots,
};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "specops_short_way", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_specops_short_way(void)
{
    PyObject *made = PyModule_Create(&module);
    PyObject *way = PyType_FromSpec(&way_spec);
    if (made == NULL || way == NULL || PyModule_AddObject(made, "Way", way) < 0) {
        Py_XDECREF(way);
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
